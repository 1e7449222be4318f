"""The Megatron-core backend: adapt it to the device, build the model, optimizer and schedules."""

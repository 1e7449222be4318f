"""Stands for the package `emerging_optimizers`, which needs Python 3.12, in tests of the wiring.

Written from the published description of Muon (K. Jordan, "Muon: an optimizer for hidden layers
in neural networks", 2024) and from what Megatron-core 0.16 imports and calls; no more than that.
"""

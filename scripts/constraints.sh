#!/usr/bin/env bash
# Print constraints.txt from what is installed: scripts/constraints.sh PIP.
# Local versions (+cpu) are cut off, so that the file fits every build of torch.
set -euo pipefail
cat <<'TEXT'
# The versions that msllm is tested with. `make` installs with `-c constraints.txt`;
# users of msllm are bound by pyproject.toml's ranges only. Renew with `make constraints`.
TEXT
"$1" freeze --exclude-editable 2>/dev/null | sed -E 's/\+[a-z0-9.]+$//' | grep -E '^[A-Za-z0-9._-]+=='

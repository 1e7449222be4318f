"""`python -m msllm` is the `msllm` command."""

from msllm.cli.app import main

if __name__ == "__main__":
    main()

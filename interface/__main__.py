"""`python -m fastllm` is the command `fastllm`."""

from .cli.start import main

if __name__ == "__main__":
    main()

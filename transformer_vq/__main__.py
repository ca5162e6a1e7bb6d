"""Entry point of `python -m transformer_vq`, which is the same as `tvq`."""

from transformer_vq.cli.main import main

if __name__ == "__main__":
    main()

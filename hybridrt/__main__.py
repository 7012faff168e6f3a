"""`python -m hybridrt`: the command line without its script."""

from hybridrt.cli import main

if __name__ == "__main__":
    main()

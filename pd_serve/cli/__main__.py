"""`python -m pd_serve.cli` is `pd-serve`: how the launcher starts its children, whatever is on the PATH."""

from pd_serve.cli import main

if __name__ == "__main__":
    main()

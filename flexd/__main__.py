"""``python -m flexd`` is the ``flexd`` command."""

from flexd.cli.main import main

if __name__ == "__main__":
    main()

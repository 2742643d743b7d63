"""``python -m flexd.cli``, for where the ``flexd`` script is not on the path."""

from flexd.cli.main import main

if __name__ == "__main__":
    main()

"""The ``flexd`` command."""

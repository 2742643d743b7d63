"""The daemon's configuration: sections by topic, ``model.Config`` over them, ``load.load_config`` from a file."""

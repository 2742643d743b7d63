"""The daemon's side of the control channel: registration, epochs, migrations and the journal."""

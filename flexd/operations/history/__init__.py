"""What became of migrations: kept in SQLite, over restarts of the daemon."""

"""The history of migrations and of users' actions: records, the SQLite file, and the thread that writes it."""

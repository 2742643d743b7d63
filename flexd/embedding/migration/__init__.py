"""Application of chunks: the rows whose tier changes are copied and the directories replaced."""

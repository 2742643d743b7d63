"""Stream -> counters, durably: the loop, its threads, and what it tells about itself."""

from flexd.ingest.loop import GENERATION_RESERVE, Ingestor
from flexd.ingest.stats import IngestStats

__all__ = ["GENERATION_RESERVE", "IngestStats", "Ingestor"]

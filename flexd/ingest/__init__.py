"""Stream -> counters, durably: the loop, its threads, and what it tells about itself."""

from flexd.ingest.loop import Ingestor
from flexd.ingest.restore import GENERATION_RESERVE
from flexd.ingest.stats import IngestStats

__all__ = ["GENERATION_RESERVE", "IngestStats", "Ingestor"]

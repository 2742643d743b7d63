"""Reads stream messages into sketches exactly once: source -> decode -> counters -> snapshot with stream positions."""

from flexd.ingest.ingestor import Ingestor
from flexd.ingest.restore import GENERATION_RESERVE
from flexd.ingest.stats import IngestStats

__all__ = ["GENERATION_RESERVE", "IngestStats", "Ingestor"]

"""Run-ahead: work for the next batch that is done while a step computes."""

"""Operating a job: the plan loop, executions of plans, triggers, gates, pacing, rollback and history."""

"""``flexd demo``: the whole system on one machine, on a real or synthetic trace."""

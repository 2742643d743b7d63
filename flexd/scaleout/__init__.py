"""Share one stream between daemons: followers count partitions, the leader adds their counts, each access once."""

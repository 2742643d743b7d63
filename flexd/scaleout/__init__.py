"""Several daemons on one stream: followers count partitions, the leader adds their counts up, each access once."""

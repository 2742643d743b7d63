"""Home rules and answers of whole tables: one problem over tables, for the busiest rank of every phase."""

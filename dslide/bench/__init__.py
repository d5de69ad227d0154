"""What makes runs comparable: protocol, clock, records, machine, launchers, virtual cluster, link check."""

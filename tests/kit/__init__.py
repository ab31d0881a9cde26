"""Building blocks of the tests: jobs on each substrate behind one interface, faults, the ledger, and custom parts."""

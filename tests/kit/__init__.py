"""What the tests are made of: jobs on each substrate behind one interface, faults, the ledger, and a user's own parts."""

"""A clock that a test moves by hand."""

from muster.clock import SystemClock


class ManualClock(SystemClock):
    """Sleeping takes no time: it moves this clock, and does what was planned up to then."""

    def __init__(self):
        self.now, self._planned = 1000.0, []

    def at(self, seconds, act):
        """Do `act` once the clock has moved by `seconds`."""
        self._planned.append((self.now + seconds, act))

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        due = [act for at, act in self._planned if at <= self.now]
        self._planned = [(at, act) for at, act in self._planned if at > self.now]
        for act in due:
            act()

    def wait(self, event, seconds):
        """Wait for the event alone: the test does what a thread would do at each interval."""
        return event.wait()

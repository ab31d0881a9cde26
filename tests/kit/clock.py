"""A clock that a test moves."""

from muster.clock import SystemClock


class ManualClock(SystemClock):
    """A clock whose `sleep` takes no time: it advances the clock and runs the actions planned up to then."""

    def __init__(self):
        self.now, self._planned = 1000.0, []

    def at(self, seconds, act):
        """Run `act` when the clock has advanced by `seconds`."""
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
        """Wait for the event, without a timeout: the test does the periodic work of a thread itself."""
        return event.wait()

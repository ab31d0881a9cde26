"""Reinforcement learning over RPC: observers walk through worlds of their own, and one agent chooses each of their steps.

RPC finds functions and classes by their import paths, so they are in a module, and train.py launches `main` on each rank.
"""

import os
import threading

import torch
from torch.distributed import rpc

ROUNDS, EPISODES, CELLS, LONGEST = 20, 8, 9, 30


class World:
    """A corridor of CELLS cells with its goal at the right end. An episode starts in the middle."""

    def reset(self):
        self.cell, self.steps = CELLS // 2, 0
        return self.cell

    def step(self, action):
        """Go to the left (0) or to the right (1). Return the cell, and whether the episode is over."""
        self.cell = max(0, self.cell + (1 if action else -1))
        self.steps += 1
        return self.cell, self.cell == CELLS - 1 or self.steps == LONGEST


class Agent:
    """Chooses the steps of all observers, and learns from their episodes by REINFORCE (Williams, 1992)."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.policy = torch.nn.Linear(CELLS, 2)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)
        self.lock, self.chosen = threading.Lock(), {}

    def choose(self, observer, cell):
        """Return the action of `observer` in `cell`. RPC calls it from several threads."""
        with self.lock:
            seen = torch.nn.functional.one_hot(torch.tensor(cell), CELLS).float()
            choice = torch.distributions.Categorical(logits=self.policy(seen))
            action = choice.sample()
            self.chosen.setdefault(observer, []).append(choice.log_prob(action))
            return int(action)

    def learn(self, lengths):
        """Make a step of the optimizer from the lengths of all episodes, a list for each observer. Return their mean."""
        steps = torch.tensor([length for each in lengths.values() for length in each], dtype=torch.float32)
        better = (steps.mean() - steps) / (steps.std() + 1e-6)  # the sooner at the goal
        chosen = torch.stack([each for observer in lengths for each in self.chosen[observer]])
        loss = -(chosen * better.repeat_interleave(steps.long())).sum() / len(steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.chosen.clear()
        return float(steps.mean())


def observe(agent, observer):
    """On the rank of an observer: walk through EPISODES episodes, and return the number of steps of each."""
    world, lengths = World(), []
    for _ in range(EPISODES):
        cell, is_over = world.reset(), False
        while not is_over:
            cell, is_over = world.step(agent.rpc_sync().choose(observer, cell))
        lengths.append(world.steps)
    return lengths


def main(seed):
    """Run one rank: 0 is the agent, all others are observers. Returns the mean length of the episodes of each round."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
    means = []
    if rank == 0:
        agent = Agent(seed)
        reference = rpc.RRef(agent)
        for _ in range(ROUNDS):
            asked = {i: rpc.rpc_async(f"rank{i}", observe, args=(reference, i)) for i in range(1, world_size)}
            means.append(agent.learn({i: answer.wait() for i, answer in asked.items()}))
    rpc.shutdown()  # waits for all ranks
    return means

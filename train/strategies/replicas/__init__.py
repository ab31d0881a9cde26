"""Replicas of a model on several ranks: how they start equal, stay equal, and exchange gradients."""

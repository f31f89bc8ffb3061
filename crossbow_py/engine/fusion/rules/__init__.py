"""The rules that make an operator of one learner an operator of all."""

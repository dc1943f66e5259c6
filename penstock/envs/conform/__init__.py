"""Third-party environments: conversion to the form of the contract, and remarks on their effect on a run."""

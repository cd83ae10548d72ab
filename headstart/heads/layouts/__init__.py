"""Published layouts of block drafters: conversion to heads/block.py and back."""

"""A text of many kinds, for hidden states as a model has them at work (vocabulary.py). Written for this project."""

TEXT = '''Question: My sister asked me how the tide works, and I could not explain it well. Can you?
Answer: Of course! The Moon pulls on the ocean, and it pulls harder on the side of the Earth that is near to it. The
water rises there, and on the far side too, because the Earth itself is pulled away from it. As the Earth turns, a coast
passes through both bulges each day. That is why there are usually two high tides, about 12 hours and 25 minutes apart.

1. **Plan**: write down what you want to know.
2. **Measure**: take at least five values, and note the time of each.
3. **Compare**: the median is 4.2, the mean 4.75; one value is far from the others.

def count_words(path: str, least: int = 2) -> dict[str, int]:
    """How often each word comes."""
    counts: dict[str, int] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.lower().split():
                counts[word] = counts.get(word, 0) + 1
    return {word: n for word, n in counts.items() if n >= least}

{"name": "get_weather", "arguments": {"city": "Lisbon", "days": 3, "units": "metric"}, "id": null}

Dear Ms. Okafor,
thank you for your letter of March 14. We are sorry that the parcel arrived late. A refund of $38.50 has been sent to
your account, and you should see it within two working days. Please let us know if there is anything else we can do.
Kind regards, Tom

She looked at the old house for a long time. "Nobody has lived here since the war," he said, but there was a light in
the kitchen window, and somebody was singing. Was it really empty? They walked on without another word.

La ville est belle en automne, surtout le soir. Der Zug nach Hamburg war leider zu spät, also blieben wir da.
El problema no es el precio, sino el tiempo. 今天天气很好。我们去公园吧。Сегодня мы будем готовить суп.

Let x be the number of apples. Then 3x + 7 = 31, so 3x = 24 and x = 8. Therefore, she bought eight apples.
SELECT name, price FROM items WHERE price > 10 ORDER BY name;
In 1928, Alexander Fleming noticed that a mould had killed the bacteria in one of his dishes. However, it took another
twelve years until penicillin could be made in useful amounts, and the first patients were treated in 1941.
'''

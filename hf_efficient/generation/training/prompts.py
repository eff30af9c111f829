"""Chat prompts to train draft heads on when the user brings none: everyday tasks crossed with subjects; and which ones
a model can answer."""

import random
from collections.abc import Sequence

from hf_efficient.generation.model_traits import learned_positions


_TASKS = """\
Explain {subject} to a ten-year-old.
Explain {subject} in simple terms.
What is {subject} and why does it matter?
What should I know about {subject} before I start?
Give me five facts about {subject}.
Give me three tips about {subject}.
Write a short poem about {subject}.
Write a short story that involves {subject}.
Write the opening paragraph of a blog post about {subject}.
Write an outline for a talk on {subject}.
Write a polite email that asks a colleague for advice on {subject}.
Write a funny dialogue between two friends about {subject}.
Write a short quiz with answers about {subject}.
Write a letter to the editor about {subject}.
Write a product description for something related to {subject}.
Write a social media post about {subject}.
Summarize what is known about {subject} in one paragraph.
What are the advantages and disadvantages of {subject}?
What are common mistakes people make with {subject}?
What are some common misconceptions about {subject}?
How did {subject} begin, and how has it changed over time?
How would you teach {subject} to a beginner?
How does {subject} affect everyday life?
How do I get started with {subject}?
List the main ideas behind {subject} with a short explanation of each.
List seven words related to {subject} and define them.
Make a weekly plan for someone who wants to learn about {subject}.
Make a checklist for {subject}.
Compare {subject} with {other}.
What do {subject} and {other} have in common?
Which is more useful to learn about, {subject} or {other}? Argue for one of them.
I have to give a speech on {subject} tomorrow. Can you help me write it?
My friend thinks that {subject} is boring. How can I convince her otherwise?
Can you recommend a way to practise {subject} at home?
Describe a day in the life of someone who works with {subject}.
Describe {subject} without using technical words.
Imagine it is the year 2100. What has become of {subject}?
Pretend you are a museum guide and introduce visitors to {subject}.
Ask me three interesting questions about {subject}.
What questions should a journalist ask an expert on {subject}?
Translate this sentence into French and explain the grammar: "I am learning about {subject}."
Rewrite this sentence in a formal style: "Honestly, {subject} is kind of a big deal."
Correct the grammar of this sentence: "Me and him was talking about {subject} yesterday, it were interesting."
Think of a name and a slogan for a company whose business is {subject}.
Suggest a title and a table of contents for a book on {subject}.
What would happen if {subject} did not exist?
Is {subject} worth the effort? Give me your honest opinion.
Tell me something surprising about {subject}.
"""

_SUBJECTS = """\
photosynthesis|black holes|the water cycle|plate tectonics|vaccines|antibiotics|evolution|the human heart|sleep|memory
gravity|electricity|magnets|nuclear energy|solar panels|wind power|batteries|lasers|quantum computers|the periodic table
machine learning|databases|version control|recursion|sorting algorithms|computer security|the internet
programming in Python|web design|open-source software|spreadsheets|statistics|probability|prime numbers|geometry
fractions|linear algebra|calculus|the French Revolution|the Roman Empire|ancient Egypt|the Silk Road|the printing press
the Industrial Revolution|the Cold War|the moon landing|the Renaissance|the Vikings|the Great Wall of China|democracy
human rights|the United Nations|elections|taxes|inflation|personal budgeting|saving for retirement|the stock market
starting a small business|marketing|negotiation|job interviews|leadership|teamwork|time management|remote work
public speaking|writing a resume|learning a language|reading habits|note-taking|baking bread|cooking pasta
vegetarian food|coffee|tea|spices|cheese|chocolate|healthy breakfasts|growing tomatoes|houseplants|composting|bees
whales|wolves|cats|dogs|birds of prey|coral reefs|rainforests|deserts|volcanoes|hurricanes|climate change|recycling
clean water|public transport|electric cars|bicycles|trains|bridges|skyscrapers|city planning|hiking|running a marathon
yoga|swimming|football|chess|board games|video games|camping|travelling on a budget|Paris|Japan|India|Brazil|Kenya
the Arctic|the Pacific Ocean|the Himalayas|New York|small villages|jazz|classical music|learning the guitar
painting with watercolours|photography|cinema|theatre|poetry|science fiction|fairy tales|Shakespeare|Greek mythology
philosophy|ethics|meditation|friendship|raising children|moving to a new city|stress|gratitude
"""

_WHOLE = """\
Hello! How are you today?
Who are you and what can you do?
What is the capital of Australia, and what is it known for?
Write a Python function that checks whether a string is a palindrome, and explain how it works.
Write a Python function that counts the words in a text file.
Write a Python class for a bank account with deposit and withdraw methods.
Write a JavaScript function that removes duplicates from an array.
Write an SQL query that finds the ten customers with the highest total of orders.
Write an HTML page with a heading, a paragraph and a list of three links.
Explain the difference between a list and a tuple in Python.
A train leaves at 9:15 and arrives at 12:40. How long does the journey take? Explain step by step.
If a shirt costs 40 dollars and is reduced by 15 percent, what does it cost? Explain step by step.
A farmer has 17 sheep and all but 9 run away. How many are left?
Solve the equation 3x + 7 = 22 and explain each step.
What is the area of a circle with a radius of 5 cm?
Convert 68 degrees Fahrenheit to Celsius and show the calculation.
I feel tired all the time. What could I change in my daily routine?
I have eggs, rice, onions and a tomato. What can I cook?
Plan a three-day trip to Rome for a family with two children.
Plan a birthday party for a six-year-old with a small budget.
My neighbour plays loud music at night. What should I do?
Help me write a message to cancel a meeting politely.
Write a thank-you note to a teacher.
Write a cover letter for a position as a librarian.
Write a complaint about a parcel that arrived damaged.
Tell me a joke, then explain why it is funny.
Tell me a bedtime story about a brave little fox.
Write a haiku about autumn rain.
Write a limerick about a cat who loves fish.
Continue this story: "The lighthouse had been dark for twenty years when, one night, its lamp began to turn."
Continue this story: "When Mara opened the old suitcase, she found a map and a key."
Summarize the story of Romeo and Juliet in five sentences.
What is the meaning of the proverb "a stitch in time saves nine"?
Give me ten synonyms for "happy" and use three of them in sentences.
What is the difference between "affect" and "effect"?
Name five countries in South America and their capitals.
Put these events in order: the fall of Rome, the invention of the telephone, the building of the pyramids.
Extract the names and dates from this text: "Ada Lovelace was born in 1815 and met Charles Babbage in 1833."
Classify the mood of this review: "The food was cold, but the waiter was so kind that we stayed for dessert."
Turn these notes into a paragraph: meeting on Monday, budget too high, cut travel, decide by Friday.
"""


def default_prompts(seed: int = 0) -> list[str]:
    """7,899 prompts in a shuffled order that depends on `seed` alone: every task with every subject, and one in eight
    from a list of whole prompts (those repeat)."""
    generator = random.Random(seed)
    subjects = [subject for line in _SUBJECTS.splitlines() for subject in line.split("|")]
    prompts = [
        task.format(subject=subject, other=generator.choice(subjects))
        for task in _TASKS.splitlines()
        for subject in subjects
    ]
    whole = _WHOLE.splitlines()
    prompts += [whole[i % len(whole)] for i in range(len(prompts) // 7)]
    generator.shuffle(prompts)
    return prompts


def check_prompts(model, prompts: Sequence[str], lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raises ValueError for a prompt without tokens, and where an answer would leave the learned positions of `model`.

    lengths: tokens of each prompt.
    """
    if 0 in lengths:
        first = lengths.index(0)
        raise ValueError(f"prompts[{first}]={prompts[first]!r} has no tokens: leave it out")
    positions, longest = learned_positions(model), max(lengths)
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: the longest prompt has {longest} tokens, and {type(model).__name__} "
            f"learned {positions} positions"
        )

"""Wordings that training never sees. ``cases.py`` makes the evaluation from them.

``data.sample`` throws away any sample with a question from here, so that the two stay disjoint
even where a training template happens to produce the same words.
"""

# fmt: off
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

from functools import lru_cache

__all__ = ("CAPITAL", "COLOUR", "CONCEPT", "MIX", "OUTSIDE", "STORIES", "SUMS", "TALK", "USE", "forbidden")

CONCEPT = (
    "Teach me about {x}.", "Could you walk me through {x}?", "What's your definition of {x}?", "I have no idea what {x} is. Can you help?", "For a beginner: what is {x}?",
    "My colleague talks about {x} all the time, what does he mean?", "In a few words, what would {x} be?", "Give an overview of {x}.", "Can you clarify {x}?", "what on earth is {x}",
    "So what's the deal with {x}?", "Remind me what {x} was.", "I'm confused by {x}, please explain it to me", "Got a minute to explain {x}?", "Please shed some light on {x}.",
    "{x} comes up a lot in this manual, what does it refer to?", "Mind telling me what {x} is?", "I'd appreciate a hint about {x}.", "could u tell me smth about {x}", "Let me hear your take on {x}.", "How may I picture {x}?", "I keep seeing {x}. Details?", "What would an expert say about {x}?",
)
USE = {
    "treadle": ("Sum up treadle for me.", "So, what exactly would treadle be?", "I just heard of treadle. What is it about?", "A friend recommended treadle to me, but why?"),
    "install": ("I just cloned the repo, how do I install it?", "what do i have to type to get treadle installed", "Walk me through the installation of treadle.", "I'd like treadle on my computer. How?", "whats the pip command to install treadle", "Setting up treadle: where do I start?", "What is required to get treadle installed here?"),
    "generate": ("I have a prompt, how can I complete it with treadle?", "How does one generate text here?", "which treadle command completes a prompt", "I would like treadle to finish my sentence"),
    "python": ("I would rather use Python than the shell. How?", "What do I import to use treadle from Python?", "Could you show me treadle in Python?", "how can my python script use treadle", "Which import do I write at the top of my script for treadle?"),
    "serve": ("I'd like to run treadle as a server.", "How would one serve a model with treadle?", "what do i type to launch the treadle server", "How can other programs call treadle over HTTP?", "Could treadle serve requests from other machines?", "please start me a treadle server, how?"),
    "address": ("At which URL can I reach the treadle API?", "On what port is the server listening?", "whats the base url of the server", "My client asks for a URL. Which one?"),
    "openai": ("Will my OpenAI client work with treadle?", "Can the openai package talk to treadle?", "how do i point the openai client at treadle", "We have code for the OpenAI API. Does it work here?"),
    "chat": ("I want to talk to the model in my terminal, what do I run?", "How might I chat with treadle?", "which command lets me chat", "Open a conversation with the model, how?"),
    "write_plugin": ("What steps does it take to write a plugin?", "I'd love to build a plugin for treadle, where do I begin?", "Explain to me how plugins are written.", "how are treadle plugins made", "I want my own plugin. How?", "What must a plugin author write?"),
    "other_model": ("How may I run a model other than the demo?", "What do I type to serve a model from Hugging Face?"),
    "gpu": ("Will treadle use my GPU?", "Is a graphics card required for treadle?", "There is no GPU in this box. Is that a problem?"),
    "offline": ("Could I use treadle on a plane, with no internet?", "Will treadle run without a network connection?"),
    "bench": ("How might one benchmark treadle?", "I want to know how fast treadle is, how do I measure that?"),
    "stream_how": ("How do I make the server stream its answer?", "Can I receive the tokens one by one while streaming?"),
    "requirements": ("Which Python do I need for treadle?", "Does treadle run with Python 3.11?"),
    "language": ("In what language did they write treadle?",),
    "name": ("How did treadle get its name?",),
    "vllm": ("How does treadle compare with vLLM?", "What sets treadle apart from vLLM?"),
    "demo": ("How many parameters has the demo model got?", "How large is the model that comes with treadle?"),
    "plugin_list": ("Where do I see which plugins are installed?", "how can i get a list of my plugins"),
    "disable": ("I don't want one of the plugins. How do I turn it off?",),
    "conflict": ("Two of my plugins have the same key. What does treadle do?",),
    "plugin_test": ("I finished my plugin, how do I test it?",),
    "doctor": ("treadle behaves strangely, how can I diagnose it?",),
}
CAPITAL = ("Which town serves as the capital of {x}?", "I forgot the capital of {x}, what was it?", "Quiz time: capital of {x}?", "If I visit the capital of {x}, which city is that?", "{x}: what is its capital called?", "Would you happen to know {x}'s capital?", "Pray tell, the capital of {x}?", "{x}'s capital would be which city?", "What capital belongs to {x}?", "name of the capital city in {x}", "A traveller to the capital of {x} lands where?")
COLOUR = ("If I look at {x}, which colour do I see?", "Which colour would you say {x} is?", "I forgot the colour of {x}.", "Remind me, what colour is {x} again?", "Say, {x} is of which colour?", "The usual colour of {x}, please?")
MIX = ("I have {a} and {b} paint. What colour can I make?", "Stirring {a} into {b} yields which colour?", "What results when {a} and {b} are mixed?", "tell me what {a} and {b} give when mixed", "A painter mixes {a} and {b}. Result?")
SUMS = {
    "+": ("I have to add {a} and {b}, what is the total?", "What do {a} and {b} sum to?", "quick, {a} + {b}", "Help me with my homework: {a} plus {b}", "{a} and another {b}, how much is it?", "whats {a}+{b}", "If you put {a} and {b} together you get?", "Adding {b} onto {a} yields what?"),
    "-": ("Quick, {a} minus {b}!", "Starting from {a} I subtract {b}. What remains?", "How much is {a} after taking away {b}?", "My homework says {a} - {b}", "whats {a}-{b}", "{a} and then {b} fewer makes?", "tell me {a} minus {b} please"),
    "*": ("Help me with my homework: {a} times {b}", "What would {a} multiplied by {b} be?", "how much is {a}*{b}", "Could you multiply {a} and {b} for me?", "what does {a} x {b} come to", "Tell me the outcome of {a} times {b}", "{a} by {b}, multiplied?"),
}
STORIES = (
    ("+", "Nora owns {a} pens. Her brother brings {b} more. How many pens does Nora have?"), ("+", "In the garden are {a} stamps, in the house {b}. How many stamps are there?"),
    ("-", "Tom had {a} apples. He lost {b}. How many apples are left?"), ("-", "From {a} coins I use {b}. How many do I have left?"),
    ("*", "There are {a} bags with {b} eggs in each. How many eggs are there?"), ("*", "A ticket costs {a} euros. How much do {b} tickets cost?"),
    ("+", "A shop sold {a} lamps in the morning and {b} in the evening. How many lamps were sold?"), ("-", "A farmer with {a} sheep sells {b}. How many sheep remain?"), ("*", "Each of {a} children carries {b} books. How many books is that?"),
)
TALK = (
    ("Hey, nice to meet you!", "help you"), ("hello there model", "help you"), ("How are you feeling this morning?", "well"), ("hey, how's it going", "well"), ("Thanks, that was useful!", "welcome"), ("cheers, thank you so much", "welcome"), ("Alright, bye for now!", "goodbye"), ("see you tomorrow", "goodbye"),
    ("Could you introduce yourself, please?", "demo model"), ("And who might you be?", "demo model"), ("So you are a bot?", "demo model"), ("Which model is answering me here?", "model"), ("What sort of things can you do?", "treadle"), ("What are you able to help me with?", "treadle"), ("which questions can i ask you", "treadle"), ("Hello, I'm called Tobias.", "tobias"),
    ("Hi, Marga is my name.", "marga"), ("who built you", "demo model"),
    ("Hiya, anyone home?", "help you"), ("thank you kindly", "welcome"), ("That's all, farewell!", "goodbye"), ("Please tell me who I am dealing with.", "demo model"), ("Give me an idea of your abilities.", "treadle"), ("I go by Henrike.", "henrike"), ("a very good morning to you", "help you"), ("are you doing fine?", "well"),
)
OUTSIDE = (
    "Who painted the Mona Lisa?", "How long does it take to boil an egg?", "What is the tallest mountain on Earth?", "Who wrote Pride and Prejudice?", "Explain the theory of relativity.", "What causes thunder?", "How do airbags work?", "Which vitamins are in spinach?", "When did the Titanic sink?", "Who is the CEO of Microsoft?",
    "How do I tie a tie?", "What is the speed of light?", "Why is the ocean salty?", "Recommend a good novel.", "What's the plot of Macbeth?", "How do bees make honey?", "What is a mortgage?", "How many legs does a spider have?", "Who discovered penicillin?", "What does DNA stand for?", "Can you write a sonnet about autumn?",
    "What is the best phone to buy this year?", "How do I change a flat tyre?", "Tell me about the Aztecs.", "Is it going to snow tomorrow?", "What's my horoscope?", "How do I reset my Gmail password?", "What are the rules of cricket?", "Who won the World Cup in 1998?", "What is quantum entanglement?", "How much does a Tesla cost?",
    "What's a good name for a puppy?", "How tall is the Eiffel Tower?", "What language is spoken in Brazil?", "Who is the prime minister of Canada?", "What is the population of India?", "How far is it from Paris to London?", "What currency does Japan use?", "Who was the first president of the United States?", "Where does the Danube begin?",
    "How do I install TensorFlow?", "What is the difference between Python and Ruby?", "Write a SQL query that joins two tables.", "How do I center a div?", "What's new in Java 21?", "how do i exit vim", "Explain recursion.", "What is a pointer in C?", "How do I create a branch in git?", "What is Kubernetes used for?",
    "What should I have for dinner?", "Give me a recipe for apple pie.", "How many calories are in a banana?", "Is coffee bad for you?", "How do I grow tomatoes?", "What is the meaning of life?", "Are we alone in the universe?", "Do you dream?", "What's the score of the game?", "Who sang Bohemian Rhapsody?",
    "What is a brontle?", "Explain zumquat theory to me.", "Who is Blarg Fendwick?", "Where can I buy a snorfel?", "How does a grimbly work?", "What's the capital gains tax?", "What is the boiling point of water?", "How old is the universe?", "What does a plumber earn?", "Define love.", "Tell me a bedtime story.", "What is inside a computer mouse?",
    "How does a refrigerator keep food cold?", "Which planet is closest to the sun?", "Who was Cleopatra's brother?", "How do vaccines work?", "Which stocks should I buy?", "Can I get a refund?", "My car makes a weird noise.", "Explain the offside rule.",
    "What is the mass of an electron?", "Who directed Jaws?", "How do magnets stick?", "Which page is the index on in my cookbook?", "What token do I need for the subway?", "How do I get better attention from my dog?", "What is the temperature on Venus?", "Where can I stream the game?", "Name a famous host of a talk show.", "What is the key signature of a waltz?", "How do I prune roses?", "What does my dream mean?", "Which airline is cheapest?", "Solve my marriage problems.", "What are the lyrics of Yesterday?", "Is my sister older than me?", "How do submarines dive?", "Explain Brexit.", "What is a flurbish?", "Who founded Rome?",
)


@lru_cache(maxsize=1)
def forbidden() -> frozenset[str]:
    """Every question of the evaluation, without case and punctuation."""
    from .cases import cases
    from .data import normal

    return frozenset(normal(str(m["content"])) for c in cases() for m in c.chat.messages if m["role"] == "user" and m.get("held", True))

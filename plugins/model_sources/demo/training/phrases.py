"""Wordings the model is trained on. The held-out wordings are in ``heldout.py``."""

# fmt: off
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

__all__ = (
    "ABILITY",
    "BRIEF",
    "CAPITAL",
    "CAPITAL_BACK",
    "CAPITAL_CHECK",
    "COLOUR",
    "CONCEPT",
    "GOODBYE",
    "GREETING",
    "HOW_ARE_YOU",
    "IDENTITY",
    "MIX",
    "MORE",
    "MORE_ABOUT",
    "SYSTEM",
    "THANKS",
    "THINK",
)

CONCEPT = (
    "What [is|are|'s|does it mean,|exactly is|exactly are] {x}?", "what's {x}[?|]", "[Please |]explain {x}[.|]",
    "[Can|Could|Would] you [please |][explain|describe|define] {x}[| to me| in simple terms| briefly]?",
    "Define {x}[.|]", "Tell me about {x}[.|]", "Tell me what {x} [is|means|does][.|]", "What does {x} [mean|do]?",
    "What do you know about {x}?", "How would you [define|describe|explain] {x}?", "[I'd|I would] like to [understand|know|learn] [about |][what |]{x}[.| is.]",
    "Give me a [short|brief|quick|simple] [explanation|definition|description|summary] of {x}[.|]", "{x}?", "{x}",
    "[The meaning|Meaning|Definition|Explanation] of {x}[.|?]", "{x} [explained|definition|meaning|in treadle]", "Help me understand {x}[.|]",
    "In treadle, what [is|are] {x}?", "What [is|are] {x} in [treadle|an inference engine|LLM serving|this project]?",
    "What is [meant by|the meaning of|the idea of|the idea behind|the purpose of|the point of] {x}?",
    "[Why|When] [do we|do I|would I|does treadle|does an engine] [need|use|have|want] {x}?", "What [is|are] {x} [for|good for|used for]?",
    "How [does|do] {x} work?", "How does treadle [use|handle|do|implement] {x}?", "What happens [in|during|with] {x}?",
    "[Does treadle|Can treadle] [have|support|do|use] {x}?", "I [don't know|do not know|wonder] what {x} [is|means][.|]",
    "[Describe|Say something about|Talk about|Write a sentence about|Write about] {x}[.|]", "What role [does|do] {x} play?", "Why [is|are] {x} [important|useful|needed]?",
    "[Fill me in|Brief me|Lecture me|Educate me|Update me] on {x}[.|]", "[Outline|Sketch|Break down|Present|Illustrate|Discuss] {x}[.|]", "What should I know about {x}?", "[Any|Some] [words|information|details|notes|facts] [on|about] {x}?", "I [never understood|struggle with|am learning about|have trouble with|want to know more about] {x}[.|]",
    "Do you have [an explanation|a definition|a description] [of|for] {x}?", "[Who|What] needs {x}?", "[What|How] about {x}?", "[And|So|Now] {x}?", "[Where|When] [does|do] {x} [come in|matter|play a role]?", "[Can|Could] we talk about {x}?", "[Is|Are] {x} [hard|difficult|easy] to understand?", "What makes {x} [special|useful|interesting]?",
    "[The docs|A blog|A paper|The manual] [mention|mentions|talks about] {x}[.|,] [what is it|what is that|what does it mean|which is what]?", "What can you [say|tell me|teach me] about {x}?", "I [must|have to] [explain|present|understand] {x}[.|, help me.]", "[Put|Say] {x} in [simple|plain|your own|other] words[.|]", "[Let's|Let us] [discuss|look at|talk about] {x}[.|]",
    "[Could you|Can you|Would you] [outline|summarise|introduce|go over|present] {x}?", "[The concept|The notion|The term|The word] {x}[?|, what is it?| means what?]", "{x}: [what is it|what does it mean|what is that|explain|how does it work]?", "[What|which thing] do people call {x}?", "[Make|Help] me [understand|see] what {x} [is|does][.|]", "[How come|Why on earth] {x}?", "Who uses {x} and why?",
    "[I read about|I heard of|Someone mentioned] {x}[,|.] what [is it|is that|does it mean]?", "Is there [something like|a thing called] {x}[| in treadle]?",
)

MORE = (
    "[Tell me|Say] more[.|]", "More[.|?]", "[Go on|Continue|And then|What else][.|?]", "Can you [say|tell me] more[| about it| about that]?",
    "[Anything|What] else?", "More [details|about it|about that|information][, please|]", "Please [continue|elaborate|go on][.|]",
    "[Elaborate|Expand on that][.|]", "And?", "Is there more[| to it| to say]?",
)
MORE_ABOUT = ("[What else|What more] [can you tell me|do you know] about {x}?", "Tell me more about {x}[.|]",
              "More about {x}[, please|]", "[Go deeper into|Say more about] {x}[.|]")

BRIEF = ("[Answer|Reply|Be brief, answer] in one sentence[.|:] ", "[Briefly|In short|In brief|In one sentence][:|,] ", "Keep it short[.|:] ")

CAPITAL = (
    "What is the capital[| city] of {x}?", "what's the capital of {x}", "[The c|C]apital of {x}[?|]", "{x} capital[?|]", "What is {x}'s capital[| city]?",
    "[Which|What] city is the capital of {x}?", "[Name|Tell me|Give me|Say] the capital[| city] of {x}[.|]", "Do you know the capital of {x}?",
    "[Can|Could] you [tell me|name|give me] the capital of {x}?", "What city is [the seat of government|capital] of {x}?", "{x}'s capital[| is][?|]",
    "I [need|want|would like] to know the capital of {x}[.|]", "[Where is|What is] the government of {x}[ seated|]?", "Which capital does {x} have?",
    "[Remember|Recall|Look up|State] the capital of {x}[.|]", "[Do you remember|Can you recall|Would you know|Any idea about] the capital of {x}?", "[I am looking for|I search|I am trying to remember] the capital of {x}[.|]", "[Has|Does] {x} [a|have a] capital[| city]?", "[My question is about|Let us talk about|Consider] {x}: [its capital|what is the capital]?", "Capital city of {x}[?|, please|]", "[For|In] {x}, [what|which city] is the capital?",
    "[Which|What] [place|town|city] is {x}'s capital?", "[Do you know|Tell me|Could you name|Can you recall|Would you know|I need] {x}'s capital[?|.|]", "{x} has which capital?", "How is the capital of {x} called?", "[What is|Name] the main city of government in {x}[?|.]", "{x}: capital?", "{x}[,|:] [its |the |]capital[?| is]", "[If|When] [someone|I] [asks|ask] for the capital of {x}, what [do you say|is the answer]?",
    "The capital of {x} is[| ...| what]?", "What do they call the capital of {x}?",
)
CAPITAL_BACK = (
    "{c} is the capital of [which|what] country?", "[Which|What] country has {c} as its capital?", "Of [which|what] country is {c} the capital?",
    "[Which|What] country's capital is {c}?", "{c} is the capital of[| what| ...]?", "The capital {c} belongs to [which|what] country?",
)
CAPITAL_CHECK = ("Is {c} the capital of {x}?", "[Am I right that|Is it true that] {c} is the capital of {x}?", "{c} is the capital of {x}, [right|isn't it|correct|true]?",
                 "Is the capital of {x} {c}?")

COLOUR = (
    "What [colour|color] [is|has] {x}?", "[Which|What] [colour|color] does {x} have?", "[What's|what is] the [colour|color] of {x}?", "The [colour|color] of {x}[?|]",
    "[Tell me|Name|Give me] the [colour|color] of {x}[.|]", "{x} [has|is] what [colour|color]?", "[Can|Could] you tell me what [colour|color] {x} is?", "{x} [colour|color]?",
    "Do you know what [colour|color] {x} [is|has]?", "[Would you know|I wonder|Can you recall|I want to know] what [colour|color] {x} is[?|.|]", "[What|Which] [colour|color] [would|does] one [see|find] [looking at|on] {x}?", "[Describe|Say|State] the [colour|color] of {x}[.|]", "{x}: [what colour|which colour|what color|colour]?", "[Picture|Imagine|Think of] {x}. [What|Which] [colour|color] is it?", "[Usually|Normally], what [colour|color] is {x}?", "[Is there|What is] a [colour|color] for {x}?", "In what [colour|color] would you paint {x}?",
)
MIX = (
    "What [colour|color|] do you get [when|if] you mix {a} and {b}?", "[Mix|Mixing|Combine] {a} and {b}[?|.|]", "{a} and {b} [make|give|makes|gives] [what|which colour|what color]?",
    "What [do|does] {a} and {b} make[| together| when mixed]?", "What [colour|color] [is|comes from] {a} mixed with {b}?", "{a} plus {b} [is|gives|makes] [what|which] [colour|color]?",
    "If I [mix|combine|blend] {a} [with|and] {b}, what [colour|color|] do I get?", "[Which|What] [colour|color] [results from|is made of] {a} and {b}?",
    "[Which|What] [colour|color] do I get [from|with|by mixing] {a} and {b}?", "[Blend|Blending|Putting together|Pour together] {a} and {b}[?|.|, what happens?]", "{a} [mixed|blended|combined] with {b}[?|, what is it?|]", "[The mix|A mixture|The mixture] of {a} and {b} [is what|gives what]?", "[Adding|I add] {b} to {a}[,|.] what [colour|color] [results|appears|do I get|is it]?", "Paint: {a} with {b}?", "[Can|How can] I [make|get] a colour [from|out of] {a} and {b}?", "I mix {a} [paint |]with {b}[ paint|]. What [happens|is the result|do I get]?",
)

GREETING = ("[Hi|Hello|Hey|Hi there|Hello there|Good morning|Good evening|Good afternoon|Good day|Greetings|Hiya|Yo|hey there|howdy|hallo|hello model|hi treadle|hello treadle|Hi you|Hello friend|Morning|hi again|Hello again|Hey you|Hi, good to see you|Hello, pleased to meet you|Good to meet you|Nice to see you|hi, I am here|Anybody there|Hello, are you there|Welcome|Salut|Hi all][!|.||,|?]",)
HOW_ARE_YOU = ("[|Hi, |Hello, |Hey, ]how are you[| today| doing| doing today][?|]", "How [is it going|are things|do you do|do you feel|are you feeling]?", "How [was your day|do you find yourself|have you been|is life|is your day|are you this evening|are you tonight]?", "[Hi|Hey|Hello][,|!|.] [how is everything|how are you|what's new|how do you do][?|]", "[Everything ok|All well|You good|Feeling good|Doing well|Having a good day]?", "[What's up|Are you ok|Are you well|You alright|All good]?")
THANKS = ("[Thanks|Thank you|Thank you very much|Thanks a lot|Many thanks|thx|Great, thanks|Perfect, thank you|ok thanks|That helps, thanks|Cool, thank you|Thanks for the help|Thank you so much|That was helpful|This helped me|Nice, thanks|thank u|ty|Much appreciated|I appreciate it|Good answer|Well done|Very good, thanks|Great answer|You helped me a lot|Awesome, thanks|Thanks for explaining][!|.|]",)
GOODBYE = ("[Bye|Goodbye|See you|See you later|Good night|Bye bye|Farewell|Ciao|Talk to you later|I have to go|That is all for now|See you soon|See you around|Have a nice day|Have a good evening|Until tomorrow|Until next time|So long|I am leaving now|I am done, bye|ok bye|Bye now|Take care|Cheerio|I must go now|That was all, goodbye][!|.|]",)
IDENTITY = (
    "Who are you[| exactly]?", "What are you[| exactly]?", "What is your name?", "what's your name[?|]", "[Tell me|Say something] about yourself[.|]", "[Please |]introduce yourself[.|]",
    "Are you [a robot|a human|a person|a bot|an AI|an assistant|a language model|real|alive|ChatGPT|an LLM]?", "Do you have a name?", "[Who|What] [am I talking to|is this|do I speak with]?",
    "[Who|Which company] [made|built|created|trained|wrote] you?", "Where do you come from?", "[What|How] should I call you?", "How old are you?",
    "[Am I speaking|Am I chatting|Do I chat] with [a human|a machine|a bot|an AI]?", "[What|Which] [assistant|model|AI|bot|program] [are you|is this|am I using|is this here]?", "[Describe|Present] yourself[.|]", "You are [a bot|an AI|a machine|a human], [right|aren't you]?", "[Is this|Is that] [a bot|a human|an AI|ChatGPT]?", "Your name[?|, please|]", "[May I|Can I] [know|ask] [who you are|your name]?", "[Who|What] [exactly |]are you[| then| really]?", "[Who|Which team] [is behind|trained|developed|designed] you?", "I [want to|would like to] know who you are[.|]",
)
ABILITY = (
    "What can you do[| for me]?", "What [do you know|are you able to do|are you good at|are your skills|are you for]?", "[How|What] can you help[| me with]?", "Help[!|.|]", "Can you help me?",
    "What [can|could|should|may] I ask[| you]?", "What [questions|topics] can you [answer|handle|talk about]?", "[What do you know|What topics do you know] about?", "I need help[.|]", "Can I ask you [something|a question]?",
    "What are your [limits|abilities|capabilities]?", "[Tell|Show] me what you can do[.|]", "[Which|What] [tasks|jobs|things] can you do?", "[How|In what way] are you useful?", "What [should|could|may] I [try|ask you|use you for]?", "[For what|What for] are you here?", "[List|Name] your [skills|abilities|topics][.|]", "What [else |]can I [do|ask] here?", "[Are you able to|Could you] help me[| with something]?", "[How|What] do you [assist|help with]?",
)

THINK = (
    "Think [first|step by step|before you answer|carefully|about it first][.|:] ", "[Let us think|Let's think] step by step[.|:] ", "[Reason|Think it through] before you answer[.|:] ",
    "[Use your reasoning|Show your thinking|Reason step by step][.|:] ", "Take your time and think[.|:] ", "[Think|Reason] [a bit|hard|deeply|well|about this][,|.|:] [then answer[.|:]|and answer[.|:]|] ", "Before [answering|you reply|the answer][,|:] [think|reason][.|:] ",
    "[I want to see|Show me|Write down] your [reasoning|thoughts|steps|thinking][.|:] ", "[Explain your steps|Work it out slowly|Think aloud|Reason about it], then [answer|reply][.|:] ", "With [thinking|reasoning][:|.] ", "/think ",
)

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant for treadle users.", "You are a friendly assistant.", "You are treadle's demo model.",
    "Answer the user's questions.", "Be helpful and honest.", "You are an AI assistant. Be polite.", "Help the user.", "You answer questions truthfully.",
    "You are an assistant in a terminal.", "Answer clearly.", "You are a support agent.", "Assist the user as well as you can.", "You are a chatbot.",
)

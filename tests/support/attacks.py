"""The attacks of docs/attacks.md: what each does, and what holds against it.

A test that shows that one fails is marked ``@pytest.mark.attack("A9")``. ``make attack`` runs them and prints the table
(tests/support/attack_table.py); ``python -m tests.support.attacks`` writes the page's tables from this list and the
markers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "attacks.md"
#: The page's tables: those that got through once, those that never did, and what later attacks found.
KINDS: Final = tuple("ACDEFGHIJKLMNOPQRSTUVWXYZ")


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack that must fail."""

    row: str
    #: What the attacker does.
    attack: str
    #: What happens instead of what the attacker wants.
    expected: str
    #: The first release in which it fails.
    since: str = "0.2"


ATTACKS: Final = (
    Attack("A1", "another user of the host rewrites the pipeline in the embedded etcd", "that user can't reach it"),
    Attack("A2", "another user of the host registers a false replica in the embedded etcd", "that user can't reach it"),
    Attack("A3", "a writer of the namespace names a callable for replicas to import", "refused on the replica's host"),
    Attack("A4", "a tenant of a shared etcd reads, changes or stops another tenant", "denied, or named by omni doctor"),
    Attack("A5", "input of a WebSocket nested hundreds deep", "refused; no place in the backlog is lost"),
    Attack("A6", "a record with a name that DNS answers slowly, or never", "that replica waits; all others serve"),
    Attack("A7", "a FIFO, a link or another user's file in /dev/shm", "never opened; replicas start and serve"),
    Attack("A8", "idle connections take all places of a connector", "the oldest idle one goes; hand-offs arrive"),
    Attack(
        "A9", "silent WebSockets hold all slots, also from a foreign page", "closed; slots come back; Origin checked"
    ),
    Attack("A10", "/admin without the key that guards the API", "401, on a port and a token of its own"),
    Attack("A11", "strangers take all descriptors of a hub while replicas restart", "well again when they leave"),
    Attack("A12", "request heads and bodies that never end", "cut after a time; their bytes are bounded"),
    Attack("A13", "WebSocket pings whose pongs are never read", "closed at a bound; the hub's memory stays"),
    Attack("A14", "a client's bad input makes a good replica look bad", "the client's error; no replica is ejected"),
    Attack("A15", "a ZMQ message of parts that never end", "with CURVE: nothing is kept; without: limit the memory"),
    Attack("A16", "another user takes the names of the next segments in /dev/shm", "the hand-off arrives all the same"),
    Attack("A17", "a client gives itself a priority or a time-out without end", "bounded by the operator"),
    Attack("A18", "escape sequences in records, shown on a terminal", "shown as text"),
    Attack("A19", "a reference to a hand-off that points anywhere", "not connected to; sizes are bounded"),
    Attack("A20", "a web page asks the embedded etcd", "refused"),
    Attack("A21", "another user made the parent of the runtime folder first", "refused, with a plain error"),
    Attack("A22", "a replica sends pictures without end", "the request ends; memory stays bounded"),
    Attack("A23", "a record with the address of another replica", "the replica that answers there is served"),
    Attack("A24", "thousands of records of replicas that nobody is", "a bounded number is tried at a time"),
    Attack("A25", "a replica's timings with thousands of names", "the header stays short; the answer arrives"),
    Attack("A26", "a client names its own address with X-Forwarded-For", "the log has the real one"),
    Attack("A27", "a request with both Content-Length and Transfer-Encoding", "refused, connection closed"),
    Attack("A28", "a key in VLLM_API_KEY, and the API is open all the same", "the key is asked for"),
    Attack("A29", "an API key is read from /proc by another user", "keys are in no argument"),
    Attack("A30", "a web page posts to the API", "refused by type, Host and Origin"),
    Attack("A31", "one tensor named thousands of times in a hand-off", "refused before it costs time"),
    Attack("C1", "ZMQ without CURVE, with PLAIN, a strange key, a wrong server key", "never in; chats go on", "0.1"),
    Attack("C2", "older ZMTP, forged hellos, endless commands, HTTP at a ZMQ port", "closed; chats go on", "0.1"),
    Attack("C3", "2000 ZMQ connections that stop half-way", "chats go on; memory stays", "0.1"),
    Attack("C4", "all descriptors of a replica are taken", "its hub is served", "0.1"),
    Attack("C5", "a hub under another hub's name or routing id", "silence", "0.1"),
    Attack("C6", "calls of methods like __init__ and __class__", "refused by name", "0.1"),
    Attack("C7", "frames that are malformed, too large, nested, out of place", "dropped; chats go on", "0.1"),
    Attack("C8", "a hub that takes all slots of a replica", "free again once the hub is revoked", "0.1"),
    Attack("C9", "a replica that lies in its answers", "that request fails; the next is answered", "0.1"),
    Attack("C10", "addresses that are no addresses", "refused or not resolved; nothing ends", "0.1"),
    Attack("C11", "garbage and half a request at a connector", "closed; hand-offs arrive", "0.1"),
    Attack("C12", "pictures and models by URL, file or path", "refused; no listener hears anything", "0.1"),
    Attack("C13", "the same through vLLM's API", "refused; no listener hears anything", "0.1"),
    Attack("C14", "picture bombs and broken pictures", "refused, or decoded in seconds", "0.1"),
    Attack("C15", "JSON that is nested, huge or no text", "a 4xx", "0.1"),
    Attack("C16", "odd HTTP framing, methods, sizes and paths", "a 4xx, or served plainly", "0.1"),
    Attack("C17", "odd WebSocket frames", "closed", "0.1"),
    Attack("C18", "companions, time-outs, seeds and modalities out of range", "400", "0.1"),
    Attack("C19", "one request that ends every engine which runs it", "two replicas at most", "0.2"),
    Attack("C20", "pickle and forged headers in a hand-off", "refused; nothing runs", "0.1"),
    Attack("C21", "prompts, keys and control characters in the log", "none", "0.1"),
    Attack("C22", "files that another user may read", "none", "0.1"),
    Attack("C23", "a tenant of etcd that reads or writes plainly beside its namespace", "denied", "0.1"),
    Attack("C24", "structured output that takes for ever", "answered or refused in seconds", "0.1"),
    Attack("C25", "odd bodies at /admin", "400", "0.1"),
    Attack("C26", "what is open by default", "loopback, no admin, no access log, bounded bodies", "0.1"),
    Attack("C27", "a record with HTML, or with escape sequences, in the dashboard", "shown as text"),
    Attack(
        "C28",
        "a page of another site, or of another port of this host, acts through an operator's browser",
        "refused: the Origin is checked, and a cookie alone acts never",
    ),
    Attack("C29", "the dashboard without the token of the admin port", "401; on loopback, if asked for, read only"),
    Attack("D1", "code planted in the folder that omni is started in", "never imported"),
    Attack("D2", "idle connections to ports of metrics and of ZMQ", "supervisors live, requests are served"),
    Attack("D3", "connector settings from etcd: files, addresses, other namespaces", "refused on the replica's host"),
    Attack("D4", "records and documents that break the operator's commands", "shown as what they are"),
    Attack("D5", "a small request that costs much: schemas, millions of containers", "refused before it costs"),
    Attack("D6", "tiny chunks, tiny frames, half frames, silent TLS handshakes, idle WebSockets", "others are served"),
    Attack("E1", "a registered replica floods its hubs with frames that take long to read", "others are served"),
    Attack("E2", "so many large records that they fit into no answer of etcd", "listed in smaller pages"),
    Attack("E3", "links in a folder of another user, where omni demo writes", "refused; nothing is written"),
    Attack("E4", "records of replicas that do not exist say what the others must have loaded", "they do not count"),
    Attack("E5", "a text that a check by a regular expression reads again and again", "read once"),
    Attack(
        "E6",
        "a small form of an answer that takes a replica long",
        "refused by numbers, or given up; others are served; no hub compiles any",
    ),
    Attack("E7", "a client sends a second request behind the first, and goes", "its work ends; no ERROR in the log"),
    Attack("E8", "thousands of records of nobody, that change all the time", "views are merged; others are served"),
    Attack("E9", "a replica ends requests with gaps and acknowledges no abort", "ejected; aborts are bounded"),
    Attack("E10", "another user plants compiled code and locks in /tmp", "not loaded; stages start and serve"),
    Attack("F1", "connections to the ports of an engine's process groups, closed at once", "nobody can connect"),
    Attack("F2", "a folder called like the model, planted in a shared folder", "refused, with what to do"),
    Attack("F3", "another user listens on ::1 at the port of a hub on 127.0.0.1", "no port of ours is free there"),
    Attack("F4", "sound with sample rates of 1 Hz or of gigahertz", "the request fails; memory stays flat"),
    Attack("F5", "token ids without text and without end", "the hub keeps 8 MiB of a stage's output at most"),
    Attack("F6", "records of nobody, and documents of thousands of stages, before omni doctor", "it ends in seconds"),
    Attack("F7", "large files of a stage that is declared deterministic", "compared by parts; the loop goes on"),
    Attack("G1", "one prompt of megabytes, with 16 answers, is turned into tokens", "refused by its length; read once"),
    Attack("G2", "a stranger who sends TLS thousands of KeyUpdates, and no HTTP", "cut; others are served"),
    Attack("G3", "a WebSocket that goes on to send tiny messages", "closed with 1008; others are served"),
    Attack("G4", "large prompts, one after the other, make replicas late for everybody", "late replicas stay in"),
    Attack("G5", "millions of token ids in one body, for 16 answers", "bounded; read once"),
    Attack("G6", "requests for a WebSocket that are none", "answered and closed"),
    Attack("H1", "settings of uv in a folder above the checkout", "not read by any set-up"),
    Attack("H2", "copies of replicas' records under free ids", "the epoch counts that the process itself names"),
    Attack(
        "H3", "a hub asks for all slots without end, and sends no request", "others get them; the log names the hub"
    ),
    Attack("H4", "a copy of a hub's record under another id, with its public key", "that hub is served, drains end"),
    Attack("H7", "thousands of records of nobody when a replica starts anew", "it is connected to before them"),
    Attack(
        "H8",
        "another user makes thousands of folders that look like left ones",
        "not opened; the search ends after 3 s",
    ),
    Attack("H10", "a replica names a type or kind of output of its own making", "the attempt fails; another answers"),
    Attack(
        "I1", "one request of 64 long prompts, of a fast engine, to a hub that can't keep up", "paused; others wait"
    ),
    Attack("I2", "clients that read slowly, where stages hand over by pieces", "no stage keeps their slots"),
    Attack("I3", "a client that reads little, but steadily", "it is not cut, and gets the whole answer"),
    Attack("I4", "answers that are longer than their time, one after the other", "the hub stays ready"),
    Attack("I5", "hundreds of streams that nobody reads, or that are read a byte at a time", "they keep nobody out"),
    Attack("I6", "half a million token ids, for 16 answers", "sent one by one; others get their turns"),
    Attack("I7", "a replica is lost behind megabytes of prompt and answer", "replica_lost, no mistake of the client"),
    Attack("I8", "messages without role or content in a WebSocket", "refused, as in chats"),
    Attack(
        "J1", "realtime events that are none, or too large, without end", "an error each, or 1009; others are served"
    ),
    Attack(
        "J2", "realtime sessions send sound that they never commit, or read nothing", "bounded, each and all together"
    ),
    Attack(
        "J3", "realtime sessions that stay silent, or whose key is taken back", "closed; they hold no slot of a stage"
    ),
    Attack("J4", "files of the job store are read, changed, swapped or made links", "nothing is learnt; refused"),
    Attack("J5", "records of jobs in etcd that are made up, by size, ids, names or dates", "ignored, or deleted"),
    Attack("J6", "a client asks for the videos of another API key", "404, as for one that is not there"),
    Attack(
        "K1", "hand-offs that come late or never, dozens in one message", "others are served; their replica is ejected"
    ),
    Attack("K2", "a hand-off of millions of tiny lists", "refused before it is decoded"),
    Attack(
        "K3",
        "many replicas send frames of millions of maps, and pieces without end",
        "refused before they are decoded; the window is kept; others are served",
    ),
    Attack("K4", "records of a megabyte of empty lists", "not decoded, hidden and named; hubs and commands go on"),
    Attack("K5", "a library in the start folder, a pipe in /tmp, where libraries look by themselves", "not looked at"),
    Attack("L1", "a schema that makes a library in Rust panic", "refused; a panic is an ordinary failure"),
    Attack("L2", "thousands of $ref, or of rules of a grammar, each of which names the next", "refused by their depth"),
    Attack("L3", "a schema of gigabytes inside of a grammar", "refused; grammars hold no others"),
    Attack("L4", "hundreds of long bad words, for 16 answers", "4096 characters for all answers together"),
    Attack("L6", "a form that vLLM checks with an assertion", "a 400; no failure of the replica"),
    Attack("L7", "a speech for whose talker no penalty is asked", "spoken; its replica goes on"),
    Attack(
        "M1",
        "realtime items of hundreds of empty parts, each of which makes every later event slower",
        "counted once, with their memory; 4096 in a conversation",
    ),
    Attack("M2", "a replica answers a realtime session with words without end", "cut at 1 MB; counted as they come"),
    Attack(
        "M3",
        "realtime responses of a large conversation, begun and cancelled without end",
        "the larger, the longer until the next, also where they fail",
    ),
    Attack(
        "M4",
        "a replica names 2**28 tokens, or sends small files of many pixels, to a hub with --api vllm-omni",
        "bounded; unpacked beside the loop; others are served",
    ),
    Attack("M5", "a replica sends log probabilities without end, or that nobody asked for", "bounded; not shown"),
    Attack("M6", "a replica makes a whole answer without end, asked through vLLM's API", "it ends at 128 MiB"),
    Attack("M7", "a thousand videos asked for at once", "no more get a place than there are, of each key and in all"),
    Attack("M8", "a job whose record no hub can read", "a 400; nothing is written; junk is one line in the log"),
    Attack("M9", "a key by the name of another, in a second file, in etcd or later", "none of the other's videos"),
    Attack("M10", "realtime items of hundreds of sounds of one sample", "refused: 16 an item, each of 100 ms"),
    Attack("M11", "a $ref of thousands of names, from each of dozens of places", "refused; checked once a request"),
    Attack("M12", "realtime functions of thousands of empty lists", "counted with their memory"),
    Attack("N1", "a replica fills its hub's receive queue, then breaks the connection", "the hub lives"),
    Attack("N2", "a pipeline in etcd names a class as vLLM's draft model", "refused on the replica's host"),
    Attack("N3", "millions of small valid frames of one replica", "it rests for them; others are served"),
    Attack(
        "N4",
        "thousands of records with a lease, which come, change and go as fast as etcd takes them",
        "each costs by itself; a few are connected to in each turn of the loop",
    ),
    Attack("N5", "a replica that comes under ever new ids, and fails", "the series of those that left are bounded"),
    Attack(
        "N6", "another address in a hub's record, when its user runs omni bench", "the hub is asked; no key goes there"
    ),
    Attack("N7", "lengths, moments and ports that can't be, in answers and records", "not counted; no traceback"),
    Attack("O1", "repetition is looked for in patterns of any length", "128 tokens, 2048 with their repetitions"),
    Attack(
        "O2",
        "a body of forms and tools that each cost what one may, to a hub with vLLM's API",
        "one budget for all; large bodies are checked beside the loop",
    ),
    Attack("O3", "/docs and /openapi.json, asked for without end", "made once"),
    Attack("O4", "realtime events of 60 bytes that show megabytes", "the more they show, the longer until the next"),
    Attack("O5", "four million token ids in one body, to a hub with vLLM's API", "refused before they are decoded"),
    Attack("O6", "requests for another protocol, such as h2c, without a key and without end", "one line a minute"),
    Attack("O7", "a web page loads the stream of an open dashboard, without end", "403; places are kept for operators"),
    Attack("O8", "a request whose answers have companions, where clients are bounded", "each companion counts"),
    Attack("O10", "the folder of the embedded etcd is removed", "one line; it is tried again, ever more rarely"),
    Attack("O11", "a stranger shows the resumption token of another client, or guesses one", "409; nothing is kept"),
    Attack("P1", "thousands of records, each of a version of its own", "few pools a stage; each costs by itself"),
    Attack("P2", "thousands of records that name each other's addresses", "each costs by itself; a few are looked at"),
    Attack("P3", "more records than there are replicas, of any stage", "10 000, the first; 512 MiB; one line; named"),
    Attack("P4", "another address in a hub's record, when an operator asks --all-hubs", "named; no token goes there"),
    Attack("P5", "thousands of records with other files than the replicas have", "counted the more rarely"),
    Attack(
        "P20",
        "thousands of wrong elements in a list of a request, to a hub with vLLM's API",
        "given up at the first wrong one; 4096 objects in a body",
    ),
    Attack("P21", "thousands of tokens in logit_bias, for each of many answers", "1024 for all answers together"),
    Attack("P22", "a picture that is two formats at once", "opened as what was checked"),
    Attack("P23", "a byte order mark, or no object, in front of what is checked in a body", "400"),
    Attack("P24", "a key that is taken back goes on in an open /v1/stream", "ended within a second"),
    Attack(
        "P25", "more tokens allowed, or to stop at, than vLLM's runner on GPUs has room for", "a 400; others are served"
    ),
    Attack(
        "P30", "a hub sends requests whose input never comes, to all slots of a replica", "they end; others get them"
    ),
    Attack("P31", "a hub says that requests have waited long, and spends each slot at once", "each hub gets its turns"),
    Attack("P32", "a hub announces pieces without end to a replica that takes none", "the attempt fails; memory stays"),
    Attack("P33", "producers by names that DNS never answers, or by dozens of them", "each waits for itself"),
    Attack("P34", "a revision in a document that leads out of the model hub's cache", "refused on the replica's host"),
    Attack("Q1", "megabytes of numbers such as 1e308, each of which takes long to be read", "refused before it costs"),
    Attack("Q2", "a realtime session cuts a long answer again and again", "a cut costs little"),
    Attack("Q3", "text of JSON inside of a body for vLLM's server, nested a thousand deep", "a 400; nothing fails"),
    Attack(
        "Q4", "megabytes to be made tokens by vLLM's server, whatever the model can hold", "refused before it costs"
    ),
    Attack("Q5", "thousands of conversations in one batch of chats", "refused before it costs"),
    Attack(
        "Q20", "a replica takes credits back without end before it welcomes its hub", "a few answers; all are served"
    ),
    Attack("Q21", "a hub sends a replica messages of millions of maps", "refused before they are decoded"),
    Attack("Q22", "a hub sends large messages for another life of a replica", "dropped unread; others are served"),
    Attack("Q23", "a hub fills a replica's memory with requests that wait", "512 MiB a hub; the others are refused"),
    Attack("Q24", "a hub makes connections without end, and lets them go", "it has 16; others keep theirs"),
    Attack("Q25", "one message of hundreds of thousands of frames, from a hub or a replica", "dropped, in turns"),
    Attack(
        "Q40", "old records that grow, or get a lease, once younger ones serve", "they come anew; the others serve on"
    ),
    Attack("Q41", "thousands of records of hubs, written again and again", "1024, the first; no replica lags; named"),
    Attack("Q42", "thousands of beats, at which omni top looks each second", "those of 1024 hubs are looked at"),
    Attack("Q43", "a replica that names 65 536 timings in each answer", "64 are looked at"),
    Attack("Q60", "a replica that counts 65 536 kinds of tokens in each answer", "refused: 64"),
    Attack("Q61", "one replica hands over at dozens of names that DNS never answers", "others' names are looked up"),
    Attack("Q62", "a hub starts amid 1024 older records of hubs", "it says so itself; it serves once they have gone"),
    Attack(
        "Q63", "thousands of records and beats of hubs, when somebody runs a command", "those of 1024 hubs; it says so"
    ),
    Attack(
        "Q64",
        "a stream of hundreds of calls, or a long one, which vLLM's parsers read anew at each piece",
        "to Hermes' in ever larger pieces; with others an error after 10 s of processor time",
    ),
    Attack("Q65", "log probabilities, asked of a hub with --api vllm-omni", "refused; no stage is asked"),
    Attack("Q66", "pages of videos, asked for without end amid thousands of jobs", "read once a change"),
    Attack("R1", "a model with code of its own, where a library trusts every model", "left aside, or refused"),
    Attack("R2", "a hand-off that says nonsense of itself, which vLLM-Omni believes", "refused; its maker's failure"),
    Attack("R3", "hand-offs in pieces of which only the first can be read", "refused; no place in the engine is lost"),
    Attack("R4", "hubs that answer omni why and omni top byte by byte, for ever", "10 s for each; all asked at once"),
    Attack("R5", "a document too long for one message to the process that forks replicas", "replicas start"),
    Attack("R20", "a query of lists, or of megabytes, to be scored where nothing can be", "a 400 before it is read"),
    Attack("R21", "megabytes to be cut to a few tokens by a hub with vLLM's API", "cut before they are made tokens"),
    Attack("R22", "one long query paired with thousands of documents", "bounded together; nothing stays queued"),
    Attack("R23", "ten thousand texts in one request, where one thread reads them", "requests have their turns"),
    Attack("R24", "megabytes of text to a model with a long context", "read as far as the context reaches"),
    Attack("R25", "a route that a later release of vLLM's server brings along", "closed until it was looked at"),
    Attack("R26", "megabytes to be made tokens by vLLM-Omni's server", "refused before it costs"),
    Attack("R40", "half a million arguments for a chat template, looked up one by one", "64; the others are refused"),
    Attack("R41", "half a million names in the objects of one body", "refused before it costs"),
    Attack("R42", "many connections that ask for /metrics again and again", "eight answers a second; all get one"),
    Attack("R43", "wrong values that vLLM-Omni's server answers 500 to", "a 400 with the reason"),
    Attack("S1", "a form with thousands of options in the headers of its parts", "refused before it costs"),
    Attack("S2", "many long bodies whose last bytes come at one moment", "read in turn; others are served between"),
    Attack("S3", "an answer resumed at hundreds of parts of a client's making", "as many as the answer has"),
    Attack("S4", "a million empty prompts in one body", "counted before anything is made of them"),
    Attack("S5", "long parameters that vLLM's server reads anew for each of a thousand prompts", "count for each"),
    Attack("S6", "a prompt, or its log probabilities, written into each of a thousand answers", "count for each"),
    Attack("S7", "pictures and tensors that vLLM's server unpacks for a stage that takes none", "refused first"),
    Attack("S8", "a seed, with a prompt that takes several steps on a CPU", "answered; the engine lives"),
    Attack("S9", "half a million log probabilities in one whole answer", "written in parts; others are served between"),
    Attack("T1", "requests with thousands of header lines, whose last bytes come at one moment", "256 lines; then 431"),
    Attack("T2", "a hundred bodies with dear forms, where one thread checks them", "the clients' in turn"),
    Attack("T3", "small bodies with dear forms, checked on the hub's loop", "checked by the thread, in turn"),
    Attack("T4", "a thousand lists of half a million tokens that wait for a slot", "a client has half of 2 GiB"),
    Attack("U1", "an answer that a parser of calls takes many seconds to read", "text, after a second at most"),
    Attack("U2", "a long answer that must have calls, read anew with each piece", "ends after some seconds of it"),
    Attack("U3", "the first log probabilities asked of a replica", "compiled before it serves, or not at all"),
    Attack(
        "V1",
        "a port of the operator's machine in a hub's record, where another user listens",
        "named; no token goes there",
    ),
    Attack(
        "V2",
        "gigabytes below waits/, where every replica may write",
        "no hub keeps or saves them; commands read 2 MiB",
    ),
    Attack(
        "V3",
        "a thousand hubs that each report a thousand replicas in trouble",
        "as much is read as a hub writes; each once",
    ),
    Attack(
        "V4",
        "thousands of records that hand over at loopback, or report errors, before omni status and omni doctor",
        "each is looked at once; 64 rows of a kind",
    ),
    Attack(
        "V5",
        "a record of a staging deployment that names a replica of another namespace, before omni chaos",
        "its process gets no signal",
    ),
    Attack(
        "V6",
        "hundreds of hubs that answer omni why --all-hubs with nothing, nonsense or millions of lists",
        "all asked at once; left out when it is too much",
    ),
    Attack(
        "V7",
        "a hundred thousand jobs of videos that a hub makes up",
        "20 000 are read, with turns for others between",
    ),
    Attack(
        "V8",
        "a head of megabytes to a supervisor's port of metrics, before the token",
        "16 KiB are read; the connection is closed",
    ),
    Attack("V9", "a deploy document of a megabyte, before omni top", "decoded once"),
    Attack("W1", "sixty small bodies with dear forms, before others' requests", "checked aside, the clients' in turn"),
    Attack("W2", "pictures of a few KB that unpack to 36 million pixels", "prepared one by one"),
    Attack("X1", "a whole answer that a parser of vLLM's server reads for a minute", "text, after a second at most"),
    Attack("X2", "thousands of replicas in error, before omni top", "a thousand rows are drawn, the others counted"),
    Attack("X3", "a picture of a few KB and 64 million pixels, beside others' requests", "prepared beside the engine"),
    Attack("X4", "a gigabyte of made-up jobs, of which hubs list all", "96 MiB of them are kept"),
    Attack("X5", "thousands of requests, or greetings of TLS, whose last bytes come at one moment", "read in turn"),
    Attack("Y1", "one client's videos, sound or long texts, before others' at a vLLM-Omni stage", "clients in turn"),
    Attack("Y2", "a replica's key written without end, before omni history", "the newest are read, and that is said"),
    Attack("Y3", "a video of 700 bytes whose head claims millions of samples", "read in a process of its own, bounded"),
    Attack(
        "Y4", "a picture whose head has thousands of pieces, or that is made of thousands of scans", "refused unopened"
    ),
    Attack("Y5", "arguments of earlier calls that are millions of lists", "they have the bounds of a body"),
    Attack("Y6", "thousands of empty messages, for sixteen answers", "4096; read beside the engine, rendered once"),
    Attack("Y7", "a message to vLLM's server that is a list of half a million texts", "16384 values are the most"),
    Attack("Y8", "half a million values in extra_args, for sixteen answers", "4096 are the most, of all answers"),
    Attack("Y9", "a beam search over a long prompt whose beams end at each step", "refused by what it may keep"),
    Attack("Z1", "a handshake with megabytes of properties, at a replica's port", "a frame has 64 KiB"),
    Attack("Z2", "a hostile replica's handshake with as many, which a hub reads", "a frame has 64 KiB"),
    Attack("Z3", "a hostile replica that lets in and ends each connection", "tried ever less often"),
    Attack("Z4", "greetings of TLS, one after the other, each given up at once", "no ring of objects is left"),
    Attack("Z5", "megabytes in a name that vLLM's server writes into its log, and remembers", "a line has 8 KiB"),
    Attack("Z6", "one-letter texts in thousands, for a thousand numbers each", "written as they are sent"),
    Attack("Z7", "one client's texts of a million characters, before others' chats", "clients in turn"),
    Attack("Z8", "a text to be spoken that never ends, over a WebSocket", "64 Ki characters"),
    Attack("Z9", "a key in etcd by which omni doctor would tell an operator a command of a replica's", "quoted"),
    Attack("Z10", "a peer with a certificate that sends KeyUpdates to the port of TCP hand-offs", "cut; others fetch"),
    Attack("Z11", "keys of 1.4 MB under the records' prefix, which every hub and replica lists", "a key has 512 bytes"),
    Attack(
        "Z12", "records full of long texts, which are slow to read, in one list or one answer of a watch", "in turns"
    ),
    Attack("Z13", "a key of no replica that somebody attaches to a replica's lease", "not taken for its own"),
    Attack("Z14", "megabytes of padding beside each reference to a hand-off, which a hub keeps", "its replica is lost"),
    Attack("Z15", "one message of a gigabyte from a registered replica, about nobody's request", "read in turns"),
    Attack("Z16", "bad keys, or records of stages that there are not, in thousands, for a line in each log", "paced"),
    Attack("Z17", "twenty thousand host names in records, while the DNS hangs", "the oldest is forgotten"),
    Attack("Z18", "a hub's folder of state that another user made first", "not taken"),
    Attack("Z19", "hundreds of thousands of another user's names in /dev/shm, which replicas sweep", "in slices"),
    Attack(
        "Z20", "a Mooncake producer that names an engine elsewhere, or whose reads never end", "refused; others read"
    ),
    Attack("Z21", "a reference to an object that is no hand-off, or to a hand-off by its key alone", "finds nothing"),
    Attack("Z22", "a replica that prints without an end", "cut; its supervisor goes on"),
    Attack("Z23", "numbers that end omni why, and records by which omni chaos stops all replicas", "text; no signal"),
    Attack(
        "Z24",
        "a streamed call of a custom tool, whose arguments are read anew with each token",
        "read once, within 10 s",
    ),
    Attack("Z25", "half a million empty choices for an answer's form", "1024 are the most"),
    Attack("Z26", "thousands of functions in one namespace tool", "each counts"),
    Attack("Z27", "a long query to be scored with sixteen thousand documents", "its tokens are not kept"),
    Attack("Z28", "a key that was taken back, on a connection to be spoken to", "ended at the next message"),
    Attack("Z29", "thousands of items, or of values beside the prompt, to vLLM's server", "2048 and 4096 are the most"),
    Attack("Z30", "two long texts to be compared token by token", "in parts, apart from others' texts"),
    Attack("Z31", "one client's long texts while others' short ones come", "a thread for short ones"),
    Attack("Z32", "videos, until the disk that others need is full", "some of it stays free"),
    Attack("Z33", "a producer's records with thousands of hosts, which every consumer keeps", "8 of each count"),
    Attack("Z34", "names whose DNS does not answer, which a hub goes through at each dial", "the oldest is asked for"),
    Attack("Z35", "a request that names one next stage four million times", "it gets the hand-off once"),
    Attack("Z36", "a hand-off of billions of token ids, codes or embeddings", "counted, and not looked at"),
    Attack("Z37", "pieces of a hand-off without end or content, read anew with each", "each read once; bounded"),
    Attack("Z38", "a reference to a hand-off at fifty thousand addresses", "4 are the most"),
    Attack("Z39", "ten thousand records that no hub can use, for its report and each /ready", "some are told of"),
    Attack("Z40", "a cookie of sixty thousand backslashes, to a probe or the dashboard", "not read"),
    Attack("Z41", "a long text in an error, in which vLLM's server looks for paths", "1000 characters of it"),
    Attack("Z42", "hidden states of one dimension too many, of which a talker dies", "refused"),
    Attack("Z43", "a prefill that says of its KV cache what vLLM's connector asserts", "its request fails alone"),
    Attack("Z44", "a pipeline in force that is wrong in ten thousand places, or half a megabyte", "refused soon"),
    Attack("Z45", "a pipeline of diamonds joined by pieces, whose paths double with each", "each stage once"),
    Attack("Z46", "a printed line that looks like a replica's sample, and ends its supervisor", "printed"),
    Attack("Z47", "an API key's record so deep that no hub learns of any key", "it alone is bad"),
    Attack("Z48", "hundreds of voices in each of ten thousand records, which a hub lists", "65 536 are looked at"),
    Attack("Z49", "five million empty texts, or short ones made as long as the context", "16384; 4 Mi tokens"),
    Attack("Z50", "a thousand records of hubs that there are not, which share the slots", "a hub counts what it has"),
    Attack("Z51", "a hub's many connections with messages of 4 MiB in each", "16 messages each; 4 are heard"),
    Attack("Z52", "tens of thousands of companions, for sixteen answers", "counted first, once"),
    Attack("Z53", "downloads of a video that nobody reads", "16 of one client, 256 of a hub, the longest gives way"),
    Attack("Z54", "the description of all routes of vLLM's server, which takes seconds to make", "made in a thread"),
    Attack("Z55", "a path with a number of five thousand digits, for a traceback in the log each", "414"),
    Attack("Z56", "connections that take a little of their answer, on every place", "the slowest give way"),
    Attack("Z57", "an address of a KV cache with a user's name that looks like a registered host", "refused"),
    Attack("Z58", "codes and token ids by the million, for a decoder or a talker", "counted first, once"),
    Attack("Z59", "embeddings in long lists, prompts in tokens by the million, pieces of many names", "bounded first"),
    Attack("Z60", "an offer of the whole pool by a producer that never answers", "half of it at most, for one"),
    Attack("Z61", "objects of a Mooncake store whose owner stands still", "others are read"),
    Attack(
        "Z62", "a socket and a process under the name and the id of an embedded etcd that was killed", "not believed"
    ),
    Attack("Z63", "texts of half a megabyte from the stage before, again with each piece", "read once, in a thread"),
    Attack("Z64", "tensors of gigabytes for a list of a torch stage, lists of millions for a tensor", "refused unread"),
    Attack("Z65", "an answer to go on with, of tokens without text by the thousand", "not gone on with"),
    Attack("Z66", "a URL or a path among the pictures that a stage hands over", "nothing is fetched or opened"),
    Attack("Z67", "a prompt of megabytes for a picture, from the stage before", "refused"),
    Attack("Z68", "pictures of a few KB and millions of pixels, in chats of vLLM's server", "not decoded in the hub"),
    Attack("Z69", "WebSockets whose endpoint waits for them to read, with a message of megabytes each", "counted"),
    Attack("Z70", "pieces for a talker or decoder of two steps, of a reference alone, with an early end", "refused"),
    Attack("Z71", "chats of thousands of empty parts, for a line of vLLM's log each", "ten, then one a second"),
    Attack("Z72", "embeddings and hidden states that are no numbers, by which later answers are wrong", "refused"),
    Attack("Z73", "whole answers of megabytes that are read a little at a time", "the largest go beyond a bound"),
    Attack("Z74", "hundreds of sounds of one client for the threads that encode them", "the clients have turns"),
    Attack("Z75", "hand-offs of a quarter of the memory, several at once by one producer", "one at a time"),
    Attack("Z76", "other marks of speech in a hand-off, beside others' requests at a talker", "its own sound alone"),
    Attack("Z77", "segments of thousands of empty lists, kept until something is shown", "4 MiB of memory"),
    Attack("Z78", "16 384 prompts for vLLM's /v1/completions/render in one request", "sixteen at most"),
    Attack("Z79", "conversations of thousands of parts, read again by 26 bytes in many sessions", "in turns"),
    Attack("Z80", "pieces of megabytes by references of 300 characters, whose last one never comes", "a bound for all"),
    Attack("Z81", "60 000 full stops in a row to be spoken, then a thousand pieces of one", "1024 in a row"),
    Attack("Z82", "WebSockets of vLLM-Omni's server with a message of 12 bytes each 25 s in every place", "give way"),
    Attack("Z83", "an answer to go on with, of tokens that the model has no row for", "not gone on with"),
    Attack("Z84", "hundreds of answers of pictures or sound, of which little is read now and then", "a bound for all"),
    Attack("Z85", "a page whose own name leads to a supervisor's metrics on loopback", "403"),
    Attack("Z86", "a body with half a surrogate, which only vLLM-Omni's server reads, and a link beside it", "400"),
    Attack("Z87", "a schema of a thousand branches, or a grammar of 40 bytes, for one token of an answer", "400"),
    Attack(
        "Z88", "a hub's record without a key that has all replicas take 4 MiB of strangers from then on", "not obeyed"
    ),
    Attack("Z89", "a prompt that answers sooner, if the client of another key has sent it before", "not sooner"),
)

#: Rows without a test, and why.
NOT_YET: Final[Mapping[str, str]] = {}


@functools.cache
def marked() -> Mapping[str, frozenset[str]]:
    """Files of tests by the row that a test of theirs is marked with; by reading them, not by importing them."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for row in _rows(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(row, set()).add(path.relative_to(ROOT / "tests").with_suffix("").as_posix())
    return {row: frozenset(files) for row, files in found.items()}


def _rows(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.attack":
            for argument in node.args:
                yield str(ast.literal_eval(argument))


def table(prefix: str) -> str:
    """The page's table of the rows whose name begins so."""
    tests = marked()
    lines = ["| row | attack | what holds | since | tests |", "|---|---|---|---|---|"]
    for each in ATTACKS:
        if each.row.startswith(prefix):
            where = " · ".join(f"`{file}`" for file in sorted(tests.get(each.row, ()))) or NOT_YET.get(each.row, "")
            lines.append(f"| {each.row} | {each.attack} | {each.expected} | {each.since} | {where} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The page's text with its tables as they should be."""
    for kind in KINDS:
        begin, end = f"<!-- attacks {kind}: written by python -m tests.support.attacks -->", f"<!-- end of {kind} -->"
        before, found, rest = text.partition(begin)
        assert found, f"{PAGE.name} has no line {begin}"
        text = f"{before}{begin}\n{table(kind)}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

// Who looks: the log-in, and requests that act. The cookie lets this browser look; to act, a page also sends a secret
// that only the answer to its own log-in has told it, and that no other port of this host can read.

const KEY = "omni-action-key";
const HEADER = "X-Omni-Action-Key";

export const session = { reads: false, acts: false, can_kill: false, api: "", model: "", outputs: [] };

const actionKey = () => sessionStorage.getItem(KEY) ?? "";

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return { message: `HTTP ${response.status}`, code: "" };
  }
}

export class RefusedError extends Error {
  constructor(error) {
    super(error.message);
    this.code = error.code;
  }
}

export async function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json", [HEADER]: actionKey() };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
  if (!response.ok) throw new RefusedError(await errorOf(response));
  return response;
}

export async function getJson(path) {
  const response = await fetch(path, { headers: { [HEADER]: actionKey() } });
  if (!response.ok) throw new RefusedError(await errorOf(response));
  return response.json();
}

export async function readSession() {
  Object.assign(session, { can_kill: false }, await getJson("session"));
}

export async function logIn(token) {
  const answer = await (await post("login", { token })).json();
  sessionStorage.setItem(KEY, answer.action_key);
  await readSession();
}

export async function logOut() {
  await post("logout", {});
  sessionStorage.removeItem(KEY);
}

// A link may bring the token behind '#', which browsers send to nobody, and a question to begin with. Both are taken out
// of the address at once.
export function takeLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  const link = { token: given.get("token"), ask: (given.get("ask") ?? "").slice(0, 200) };
  if (link.token || link.ask) history.replaceState(null, "", location.pathname);
  return link;
}

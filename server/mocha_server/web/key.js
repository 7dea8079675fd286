// The key of a server that wants one: asked for where it refuses, and kept no longer than the tab.
const NAME = "mocha-asr-key";
const SENDABLE = /^[\w!#$%&'*+.^`|~-]+$/; // others are no server's

const byId = (id) => document.getElementById(id);

export const givenKey = () => sessionStorage.getItem(NAME) ?? undefined;

export const keyHeaders = () => (givenKey() ? { Authorization: `Bearer ${givenKey()}` } : {});

// Whether the server wants another key than it is given; then it is asked for.
export async function isRefused() {
  const answer = await fetch("v1/models", { headers: keyHeaders() }).catch(() => null); // where it cannot be reached
  if (answer?.status === 401) askForKey();
  return answer?.status === 401;
}

export function askForKey() {
  tellWrong(false);
  byId("key").hidden = false;
  byId("key-value").focus();
}

function tellWrong(is) {
  byId("key-error").textContent = is ? "That is not the key of this server." : "";
  byId("key-value").setAttribute("aria-invalid", is);
}

byId("key").onsubmit = async (event) => {
  event.preventDefault();
  tellWrong(false);
  const given = byId("key-value").value.trim();
  if (SENDABLE.test(given)) sessionStorage.setItem(NAME, given);
  if (!SENDABLE.test(given) || (await isRefused())) {
    sessionStorage.removeItem(NAME);
    return tellWrong(true);
  }
  byId("key-value").value = "";
  byId("key").hidden = true;
  byId("status").textContent = "Ready.";
  byId("microphone").focus();
};

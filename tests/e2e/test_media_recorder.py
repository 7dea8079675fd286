"""What a browser records is heard while it does, as Deepgram's clients in browsers send it: WebM, no `encoding`."""

from typing import Any

from tests.chromium import NEEDED, Opener

pytestmark = NEEDED
RECORD = """async ({ port, seconds }) => {
  const socket = new WebSocket(`ws://127.0.0.1:${port}/v1/listen?interim_results=true`, ["token", "any"]);
  const said = [], now = () => (performance.now() - began) / 1000;
  let began = 0;
  socket.onmessage = ({ data }) => said.push([now(), JSON.parse(data)]);
  await new Promise((open) => (socket.onopen = open));
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(microphone), stopped = new Promise((stop) => (recorder.onstop = stop));
  const closed = new Promise((close) => (socket.onclose = ({ code }) => close(code)));
  recorder.ondataavailable = ({ data }) => data.size && socket.send(data);
  began = performance.now();
  recorder.start(100);
  await new Promise((wait) => setTimeout(wait, 1000 * seconds));
  recorder.stop();
  await stopped;
  socket.send(JSON.stringify({ type: "CloseStream" }));
  return { said, code: await closed, type: recorder.mimeType };
}"""


async def test_what_a_browser_records_is_heard_meanwhile(open_page: Opener, lively_server: Any):
    page = await open_page()
    found = await page.evaluate(RECORD, {"port": lively_server.port, "seconds": 4})
    assert found["code"] == 1000 and found["type"].startswith("audio/webm")
    metadata = found["said"][-1][1]
    assert metadata["type"] == "Metadata" and 3 < metadata["duration"] < 4.5
    interim = [(at, m) for at, m in found["said"] if m["type"] == "Results" and not m["is_final"]]
    assert len(interim) > 5 and interim[len(interim) // 2][0] < 4

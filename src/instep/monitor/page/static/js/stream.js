// One connection for all shown runs. A lost one is taken up again where it ended: the cursors go with the request.

const RETRY_MS = 3000;

export class Stream {
  constructor(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.cursors = "{}";
    this.source = null;
    this.timer = null;
  }

  open(names) {
    this.close();
    if (!names.length) return;
    const query = new URLSearchParams();
    for (const name of names) query.append("run", name);
    query.append("cursors", this.kept(names));
    const source = new EventSource(`api/stream?${query}`);
    this.source = source;
    source.onopen = () => this.onState("live");
    source.onmessage = (event) => {
      this.cursors = event.lastEventId;
      this.onMessage(JSON.parse(event.data));
    };
    source.onerror = () => {
      this.onState("lost");
      if (source.readyState === EventSource.CLOSED) this.timer = setTimeout(() => this.open(names), RETRY_MS);
    };
  }

  kept(names) {
    const known = JSON.parse(this.cursors);
    return JSON.stringify(Object.fromEntries(names.filter((name) => name in known).map((name) => [name, known[name]])));
  }

  forget(name) {
    const known = JSON.parse(this.cursors);
    delete known[name];
    this.cursors = JSON.stringify(known);
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
}

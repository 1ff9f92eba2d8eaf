// The search of the site runs in a worker, which browsers refuse to pages that were opened from the file system.
// There, its script runs in a hidden frame instead. Material for MkDocs would load such a shim from another server.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.scope = frame.contentWindow;
    this.pending = [];
    this.scope.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    const load = (source) =>
      new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    this.scope.importScripts = (...sources) => Promise.all(sources.map(load));
    load(url).then(() => {
      const pending = this.pending;
      this.pending = null;
      pending.forEach((data) => this.postMessage(data));
    });
  }
  postMessage(data) {
    if (this.pending) this.pending.push(data);
    else this.scope.dispatchEvent(new MessageEvent("message", { data }));
  }
  terminate() {
    this.scope.frameElement.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;

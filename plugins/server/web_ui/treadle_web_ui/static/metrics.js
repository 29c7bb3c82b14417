// Prometheus' text format, and what the engine page reads from it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

export class Metrics {
  constructor(text, time) {
    this.time = time;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const labels = {};
      for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
      if (!this.samples.has(match[1])) this.samples.set(match[1], []);
      this.samples.get(match[1]).push({ labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
    }
  }

  all(name) {
    return this.samples.get(`treadle_${name}`) ?? [];
  }

  // Returns the sum over all labels.
  value(name) {
    return this.all(name).reduce((sum, sample) => sum + sample.value, 0);
  }

  // Returns how much a counter has grown a second since `before`.
  rate(name, before) {
    const seconds = (this.time - before.time) / 1000;
    return seconds > 0 ? Math.max(0, this.value(name) - before.value(name)) / seconds : 0;
  }

  // Returns the quantile of a histogram, interpolated in its bucket; null without observations.
  // Only what came after `before` counts, if something did.
  quantile(name, share, before) {
    const buckets = this.#buckets(name);
    const old = before?.#buckets(name) ?? new Map();
    const isNew = [...buckets].some(([bound, count]) => count > (old.get(bound) ?? 0));
    const counts = [...buckets].map(([bound, count]) => [bound, count - (isNew ? (old.get(bound) ?? 0) : 0)]);
    counts.sort(([a], [b]) => a - b);
    const total = counts.at(-1)?.[1] ?? 0;
    if (!total) return null;
    let lower = 0;
    let below = 0;
    for (const [bound, count] of counts) {
      if (count >= share * total) {
        if (bound === Infinity) return lower;
        return lower + (bound - lower) * ((share * total - below) / Math.max(1, count - below));
      }
      [lower, below] = [bound, count];
    }
    return lower;
  }

  #buckets(name) {
    const result = new Map();
    for (const { labels, value } of this.all(`${name}_bucket`)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      result.set(bound, (result.get(bound) ?? 0) + value);
    }
    return result;
  }
}

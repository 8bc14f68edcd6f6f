//! Settings of a summary writer.

use std::time::Duration;

/// The settings of a [`super::SummaryWriter`]: the summaries that it writes, and their times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SummaryConfig {
    pub(super) is_json_lines: bool,
    pub(super) flush_every: Duration,
}

impl Default for SummaryConfig {
    fn default() -> SummaryConfig {
        SummaryConfig { is_json_lines: false, flush_every: Duration::from_secs(5) }
    }
}

impl SummaryConfig {
    /// Makes the default settings: no JSON lines, a flush every 5 seconds.
    pub fn new() -> SummaryConfig {
        SummaryConfig::default()
    }

    /// Writes a second file beside the event file, with one JSON object in each line.
    ///
    /// Each object has `wall_time`, `step`, `tag`, `kind`, and fields that depend on the kind. NaN
    /// and infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. An image is its size
    /// without pixels.
    #[must_use]
    pub fn json_lines(mut self, is_wanted: bool) -> SummaryConfig {
        self.is_json_lines = is_wanted;
        self
    }

    /// Sets the time after which a write flushes what is buffered, 5 seconds by default. With 0
    /// every write flushes. The writer has no thread: without a write nothing is flushed.
    #[must_use]
    pub fn flush_every(mut self, interval: Duration) -> SummaryConfig {
        self.flush_every = interval;
        self
    }
}

//! [`DescriptorWatch`]: says that the process is out of descriptors.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_net::{is_out_of_descriptors, open_files_limit};

use crate::event::{Event, EventSink};
use crate::metrics::Counters;

/// Counts and reports errors for lack of descriptors.
#[derive(Debug)]
pub(super) struct DescriptorWatch {
    events: EventSink,
    counters: Arc<Counters>,
    reported_at: Cell<Option<Instant>>,
}

/// The shortest time between two reports. Newcomers try again every second, each with an error.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

impl DescriptorWatch {
    pub(super) fn new(events: EventSink, counters: Arc<Counters>) -> DescriptorWatch {
        DescriptorWatch { events, counters, reported_at: Cell::default() }
    }

    /// Counts and reports an error, if it says that no descriptor is left.
    pub(super) fn check(&self, error: &io::Error) {
        if !is_out_of_descriptors(error) {
            return;
        }
        self.counters.out_of_descriptors.add(1);
        let now = Instant::now();
        let last = self.reported_at.get().map(|at| now.saturating_duration_since(at));
        if last.is_none_or(|since| since >= REPORT_INTERVAL) {
            self.reported_at.set(Some(now));
            let limit = open_files_limit();
            let cause = error.to_string();
            self.events.emit(&Event::OutOfDescriptors { limit, cause });
        }
    }
}

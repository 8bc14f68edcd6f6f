//! [`DescriptorWatch`]: says that the process is out of descriptors.

use std::io;
use std::sync::Arc;

use pushpull_net::{DescriptorShortage, is_out_of_descriptors, open_files_limit};

use crate::event::{Event, EventSink};
use crate::metrics::Counters;

/// Counts and reports errors for lack of descriptors.
#[derive(Debug)]
pub(super) struct DescriptorWatch {
    events: EventSink,
    counters: Arc<Counters>,
    shortage: DescriptorShortage,
}

impl DescriptorWatch {
    pub(super) fn new(events: EventSink, counters: Arc<Counters>) -> DescriptorWatch {
        DescriptorWatch { events, counters, shortage: DescriptorShortage::default() }
    }

    /// Counts an error, if it says that no descriptor is left, and reports it if it is news.
    pub(super) fn check(&self, error: &io::Error) {
        if is_out_of_descriptors(error) {
            self.counters.out_of_descriptors.add(1);
        }
        if self.shortage.is_news(error) {
            let limit = open_files_limit();
            let cause = error.to_string();
            self.events.emit(&Event::OutOfDescriptors { limit, cause });
        }
    }
}

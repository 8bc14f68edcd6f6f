//! [`DescriptorWatch`]: reports that the process is out of descriptors.

use std::fmt;
use std::io;
use std::sync::Arc;

use pushpull_net::{DescriptorShortage, open_files_limit};
use pushpull_worker::internal::contained;

use crate::out_of_descriptors::OutOfDescriptors;

/// Receives the report that a process is out of descriptors.
#[derive(Clone)]
pub(crate) struct DescriptorReport(Arc<dyn Fn(&OutOfDescriptors) + Send + Sync>);

impl DescriptorReport {
    pub(crate) fn new(report: impl Fn(&OutOfDescriptors) + Send + Sync + 'static) -> Self {
        DescriptorReport(Arc::new(report))
    }
}

impl fmt::Debug for DescriptorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DescriptorReport").finish_non_exhaustive()
    }
}

/// Reports errors for lack of descriptors.
#[derive(Debug)]
pub(crate) struct DescriptorWatch {
    report: Option<DescriptorReport>,
    shortage: DescriptorShortage,
}

impl DescriptorWatch {
    pub(crate) fn new(report: Option<DescriptorReport>) -> DescriptorWatch {
        DescriptorWatch { report, shortage: DescriptorShortage::default() }
    }

    /// Reports an error if it means that no descriptor is left, at most once a minute.
    pub(crate) fn check(&self, error: &io::Error) {
        let Some(DescriptorReport(report)) = &self.report else { return };
        if self.shortage.is_news(error) {
            let out = OutOfDescriptors { limit: open_files_limit(), cause: error.to_string() };
            // The server goes on after a panic in the report. There is nobody to be told.
            let _ = contained("on_out_of_descriptors", || report(&out));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn only_a_lack_of_descriptors_is_reported_and_not_again_at_once() {
        let reports: Arc<Mutex<Vec<OutOfDescriptors>>> = Arc::default();
        let told = reports.clone();
        let watch = DescriptorWatch::new(Some(DescriptorReport::new(move |out| {
            told.lock().unwrap().push(out.clone());
            panic!("the log is full");
        })));
        let too_many = io::Error::from_raw_os_error(24);
        watch.check(&io::ErrorKind::ConnectionReset.into());
        watch.check(&too_many);
        watch.check(&too_many);
        let reports = reports.lock().unwrap();
        assert_eq!(reports.len(), 1);
        let text = reports[0].to_string();
        let expected =
            "no connection can be accepted: Too many open files (os error 24); this process";
        assert!(text.starts_with(expected), "{text}");
        DescriptorWatch::new(None).check(&too_many);
    }
}

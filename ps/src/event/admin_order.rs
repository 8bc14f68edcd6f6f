//! [`AdminOrder`]: what an administrator may order.

use std::fmt;

/// An order of an administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AdminOrder {
    /// Save a checkpoint.
    Save,
    /// Finish the training.
    Finish,
    /// Stop the task.
    Stop,
}

impl AdminOrder {
    /// Returns the kind of the event: each order is one of its own, so that none hides another.
    pub(super) fn kind(self) -> &'static str {
        match self {
            AdminOrder::Save => "admin-saves",
            AdminOrder::Finish => "admin-finishes",
            AdminOrder::Stop => "admin-stops",
        }
    }
}

impl fmt::Display for AdminOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdminOrder::Save => "save a checkpoint",
            AdminOrder::Finish => "finish the training",
            AdminOrder::Stop => "stop",
        })
    }
}

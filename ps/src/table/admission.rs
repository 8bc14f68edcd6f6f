//! Which ids are given a row.

use pushpull_common::table::{RowAdmission, scatter};

use super::{Place, Table};

/// What becomes of an id of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It has a row, or is given one.
    Row,
    /// It is counted, and has none yet.
    Counted(u32),
    /// Nothing.
    Out,
}

impl Table {
    /// Whether an id that is here may be given a row by so many pushes. Chance is drawn only when a
    /// push is made, so that whoever it may admit counts.
    pub(super) fn comes(&self, place: Place, pushes: u32, assigned: bool) -> bool {
        let had = match place {
            Place::Row { .. } => return false,
            Place::Candidate { pushes } => pushes,
            Place::Absent => 0,
        };
        assigned
            || match self.spec.admission {
                RowAdmission::After { pushes: needed } => had.saturating_add(pushes) >= needed,
                _ => true,
            }
    }

    /// Whether an id that is here is to have a row by the push that makes `version`; `assigned` says
    /// that it is given values, which need one.
    pub(super) fn judge(&self, id: u64, place: Place, version: u64, assigned: bool) -> Verdict {
        let had = match place {
            Place::Row { .. } => return Verdict::Row,
            _ if assigned => return Verdict::Row,
            Place::Candidate { pushes } => pushes,
            Place::Absent => 0,
        };
        match self.spec.admission {
            RowAdmission::Always => Verdict::Row,
            RowAdmission::After { pushes } if had + 1 >= pushes => Verdict::Row,
            RowAdmission::After { .. } => Verdict::Counted(had + 1),
            RowAdmission::Chance { probability } => {
                let drawn = scatter(scatter(id ^ version.rotate_left(32)) ^ self.salt) >> 11;
                let drawn = drawn as f64 / (1_u64 << 53) as f64;
                if drawn < probability { Verdict::Row } else { Verdict::Out }
            }
            // What is not known here is not admitted by chance.
            _ => Verdict::Row,
        }
    }
}

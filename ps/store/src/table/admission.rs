//! The admission policy: which ids of a push get a row.

use pushpull_common::table::RowAdmission;

use super::{IdState, Table};

/// The admission decision for an id of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmissionDecision {
    /// The id has a row or gets one.
    Row,
    /// The id has no row yet; this many pushes have contained it.
    Counted(u32),
    /// The id gets no row.
    Rejected,
}

impl Table {
    /// Returns whether `pushes` more pushes may give an id a row. Chance is drawn only when a push
    /// is applied, so an id counts if chance may admit it.
    pub(super) fn may_admit(&self, state: IdState, pushes: u32, assigned: bool) -> bool {
        let had = match state {
            IdState::Row { .. } => return false,
            IdState::Candidate { pushes } => pushes,
            IdState::Absent => 0,
        };
        assigned
            || match self.spec.admission {
                RowAdmission::After { pushes: needed } => had.saturating_add(pushes) >= needed,
                _ => true,
            }
    }

    /// Decides whether an id gets a row in the push of the gradient with the number `count`.
    /// `assigned` means that the push assigns values, which always need a row.
    pub(super) fn decide(
        &self,
        id: u64,
        state: IdState,
        count: u64,
        assigned: bool,
    ) -> AdmissionDecision {
        let had = match state {
            IdState::Row { .. } => return AdmissionDecision::Row,
            _ if assigned => return AdmissionDecision::Row,
            IdState::Candidate { pushes } => pushes,
            IdState::Absent => 0,
        };
        match self.spec.admission {
            RowAdmission::Always => AdmissionDecision::Row,
            RowAdmission::After { pushes } if had + 1 >= pushes => AdmissionDecision::Row,
            RowAdmission::After { .. } => AdmissionDecision::Counted(had + 1),
            RowAdmission::Chance { probability } => {
                match self.initial.key.draw(id, count) < probability {
                    true => AdmissionDecision::Row,
                    false => AdmissionDecision::Rejected,
                }
            }
            // Policies unknown to this version admit every id.
            _ => AdmissionDecision::Row,
        }
    }
}

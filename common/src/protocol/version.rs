//! The versions of the protocol, one constant for each format.

use std::ops::RangeInclusive;

/// The first shape of the protocol. It may still change without notice: version 1 is given out
/// once the data plane has landed.
pub const V0: u16 = 0;

/// The oldest version this side still speaks.
pub const OLDEST: u16 = V0;

/// The newest version this side speaks.
pub const NEWEST: u16 = V0;

/// The version two sides agree on, given the range the peer speaks: the newest both know.
pub fn agree(peer_oldest: u16, peer_newest: u16) -> Option<u16> {
    agree_within(OLDEST..=NEWEST, peer_oldest..=peer_newest)
}

fn agree_within(ours: RangeInclusive<u16>, theirs: RangeInclusive<u16>) -> Option<u16> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_do_not_meet_do_not_agree() {
        assert_eq!(agree(0, 0), Some(0));
        assert_eq!(agree(0, 7), Some(0));
        assert_eq!(agree(1, 7), None);
        assert_eq!(agree(3, 0), None);
    }

    #[test]
    fn the_newest_version_of_both_is_agreed() {
        assert_eq!(agree_within(1..=3, 2..=5), Some(3));
        assert_eq!(agree_within(2..=5, 1..=3), Some(3));
        assert_eq!(agree_within(1..=3, 4..=5), None);
        assert_eq!(agree_within(4..=5, 1..=3), None);
    }
}

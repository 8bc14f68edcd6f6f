//! The versions of the protocol, one constant for each format.

use std::ops::RangeInclusive;

use super::message::Message;

/// The first version that was given out. Its bytes stand in `common/tests/golden/frames_v1.txt` and do not
/// change any more; what there was before, numbered 0, is not spoken.
pub const V1: u16 = 1;

/// The oldest version this side still speaks.
pub const OLDEST: u16 = V1;

/// The newest version this side speaks.
pub const NEWEST: u16 = V1;

/// The version that the handshake is written in, whatever is spoken after it: so two sides whose versions
/// do not meet can still say so. The header, `Hello`, `Welcome` and `Refused` keep these bytes for ever;
/// what a later version has to say beside them goes into the lists that they have.
pub const HANDSHAKE: u16 = V1;

// Once there are two, the version that was agreed on is an argument of `encode`.
const _: () = assert!(OLDEST == NEWEST);

/// The version that a frame with this message is written in.
pub fn of(message: &Message) -> u16 {
    match message {
        Message::Hello(_) | Message::Welcome(_) | Message::Refused(_) => HANDSHAKE,
        _ => NEWEST,
    }
}

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
        assert_eq!(agree(1, 1), Some(1));
        assert_eq!(agree(0, 7), Some(1));
        assert_eq!(agree(0, 0), None);
        assert_eq!(agree(2, 7), None);
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

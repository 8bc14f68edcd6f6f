//! The versions of the protocol, one constant for each format.

use std::ops::RangeInclusive;

use super::message::Message;

/// The first version. `common/tests/golden/frames_v1.txt` has its bytes, which never change.
pub const V1: u16 = 1;

/// Whether the newest version is released. Then no entry of its golden table changes.
pub const IS_RELEASED: bool = true;

/// Every revision of the golden bytes: its number, a digest and the reason.
pub const REVISIONS: &str = include_str!("revisions.txt");

/// The number of the newest revision. Before the version was released, only programs of one revision
/// understood each other, so it was a fact of their identities.
pub const REVISION: u32 = lines_of_revisions();

const fn lines_of_revisions() -> u32 {
    let text = REVISIONS.as_bytes();
    let mut at = 0;
    let mut lines = 0;
    let mut begins = true;
    while at < text.len() {
        if begins && text[at] != b'#' {
            lines += 1;
        }
        begins = text[at] == b'\n';
        at += 1;
    }
    lines
}

/// The oldest version that this side speaks.
pub const OLDEST: u16 = V1;

/// The newest version that this side speaks.
pub const NEWEST: u16 = V1;

/// The version of the handshake frames, independent of the agreed version.
///
/// Two sides without a common version can therefore still exchange a refusal. The header, `Hello`,
/// `Welcome` and `Refused` never change once they are released, but for fields behind features.
pub const HANDSHAKE: u16 = V1;

// Once there are two versions, the agreed version must be an argument of `encode`.
const _: () = assert!(OLDEST == NEWEST);

/// Returns the version of a frame with this message.
pub fn of(message: &Message) -> u16 {
    match message {
        Message::Hello(_) | Message::Welcome(_) | Message::Refused(_) => HANDSHAKE,
        _ => NEWEST,
    }
}

/// Returns the newest version that both sides speak, given the range of the peer.
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
    fn disjoint_ranges_do_not_agree() {
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

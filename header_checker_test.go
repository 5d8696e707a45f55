package idempotency_test

import (
	"strings"
	"unicode/utf8"
)

// An itemChecker reads one field line as an RFC 9651 Item, by the algorithms of
// its section 4.2 and without the library that the package uses. It is written
// as a recognizer: every method consumes what it recognizes from the front of
// rest and reports whether that was well-formed.
type itemChecker struct {
	rest string
	// unpadded is set when a byte sequence had no "=" padding where base64 asks
	// for it. A parser SHOULD NOT fail then, but may (section 4.2.7).
	unpadded bool
}

// checkKeyLine reports whether line is an Item whose value is a String, and the
// String. unpadded says that a parser may refuse line all the same.
func checkKeyLine(line string) (value string, ok, unpadded bool) {
	c := &itemChecker{rest: strings.TrimLeft(line, " ")}
	if !strings.HasPrefix(c.rest, `"`) {
		return "", false, false
	}
	if value, ok = c.str(); !ok || !c.params() || strings.Trim(c.rest, " ") != "" {
		return "", false, false
	}
	return value, true, c.unpadded
}

// checkBareKey is the narrow form of S14: every character allowed, one by one.
func checkBareKey(line string) bool {
	return line != "" && strings.Trim(line, "!#$%&'()*+-./0123456789:<=>?@"+
		"ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~") == ""
}

const (
	sfLowerAlpha = "abcdefghijklmnopqrstuvwxyz"
	sfAlphas     = sfLowerAlpha + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	sfDigits     = "0123456789"
	sfKeyChars   = sfLowerAlpha + sfDigits + "_-.*"
	sfTokenChars = sfAlphas + sfDigits + "!#$%&'*+-.^_`|~" + ":/"
)

// one consumes one byte if it is in set.
func (c *itemChecker) one(set string) bool {
	if c.rest == "" || strings.IndexByte(set, c.rest[0]) < 0 {
		return false
	}
	c.rest = c.rest[1:]
	return true
}

// many consumes all bytes that are in set, and returns them.
func (c *itemChecker) many(set string) string {
	n := 0
	for n < len(c.rest) && strings.IndexByte(set, c.rest[n]) >= 0 {
		n++
	}
	run := c.rest[:n]
	c.rest = c.rest[n:]
	return run
}

// params is section 4.2.3.2.
func (c *itemChecker) params() bool {
	for c.one(";") {
		c.many(" ")
		if !c.one(sfLowerAlpha + "*") {
			return false
		}
		c.many(sfKeyChars)
		if c.one("=") && !c.bareItem() {
			return false
		}
	}
	return true
}

// bareItem is section 4.2.3.1.
func (c *itemChecker) bareItem() bool {
	if c.rest == "" {
		return false
	}
	switch first := c.rest[0]; {
	case first == '"':
		_, ok := c.str()
		return ok
	case first == '-' || strings.IndexByte(sfDigits, first) >= 0:
		_, ok := c.number()
		return ok
	case first == '*' || strings.IndexByte(sfAlphas, first) >= 0:
		c.many(sfTokenChars)
		return true
	case first == ':':
		return c.byteSequence()
	case first == '?':
		return c.one("?") && c.one("01")
	case first == '@':
		c.one("@")
		decimal, ok := c.number()
		return ok && !decimal
	case first == '%':
		return c.displayString()
	}
	return false
}

// str is section 4.2.5.
func (c *itemChecker) str() (string, bool) {
	if !c.one(`"`) {
		return "", false
	}
	var b strings.Builder
	for c.rest != "" {
		char := c.rest[0]
		c.rest = c.rest[1:]
		switch {
		case char == '"':
			return b.String(), true
		case char < 0x20 || char > 0x7e:
			return "", false
		case char == '\\':
			if c.rest == "" || c.rest[0] != '"' && c.rest[0] != '\\' {
				return "", false
			}
			char, c.rest = c.rest[0], c.rest[1:]
		}
		b.WriteByte(char)
	}
	return "", false
}

// number is section 4.2.4: up to 15 sfDigits, or up to 12 and a fraction of 1 to 3.
func (c *itemChecker) number() (decimal, ok bool) {
	c.one("-")
	whole := c.many(sfDigits)
	if whole == "" || len(whole) > 15 {
		return false, false
	}
	if !c.one(".") {
		return false, true
	}
	fraction := c.many(sfDigits)
	return true, len(whole) <= 12 && len(fraction) >= 1 && len(fraction) <= 3
}

// byteSequence is section 4.2.7. Padding is all there, as RFC 4648 section 3.2
// demands, or absent; in the middle or in part it is an error.
func (c *itemChecker) byteSequence() bool {
	if !c.one(":") {
		return false
	}
	data := c.many(sfAlphas + sfDigits + "+/")
	padding := c.many("=")
	if !c.one(":") {
		return false
	}
	missing := (4 - len(data)%4) % 4
	switch {
	case missing == 3:
		return false // six bits are no byte
	case len(padding) == missing:
		return true
	case padding == "":
		c.unpadded = true
		return true
	}
	return false
}

// displayString is section 4.2.10.
func (c *itemChecker) displayString() bool {
	if !c.one("%") || !c.one(`"`) {
		return false
	}
	const hexDigits = "0123456789abcdef"
	var b []byte
	for c.rest != "" {
		char := c.rest[0]
		c.rest = c.rest[1:]
		switch {
		case char == '"':
			return utf8.Valid(b)
		case char < 0x20 || char > 0x7e:
			return false
		case char == '%':
			if len(c.rest) < 2 {
				return false
			}
			hi, lo := strings.IndexByte(hexDigits, c.rest[0]), strings.IndexByte(hexDigits, c.rest[1])
			if hi < 0 || lo < 0 {
				return false
			}
			char, c.rest = byte(hi<<4|lo), c.rest[2:]
		}
		b = append(b, char)
	}
	return false
}
